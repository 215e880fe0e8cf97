# One image for every process of the service; compose.yaml says which command runs where.

FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/tokenmill
ENV PATH=/opt/tokenmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
# torch first and alone: the largest layer, and the one that changes least
RUN python -m pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY jobs jobs
COPY bulk bulk
COPY worker worker
COPY api api
COPY cli cli
COPY migrations migrations
RUN python -m pip install --constraint constraints.txt .

FROM python:3.11-slim
# Triton compiles its launcher with the C compiler of the machine it runs on
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /data --no-create-home tokenmill \
    && install --directory --owner tokenmill --group tokenmill /data
COPY --from=build /opt/tokenmill /opt/tokenmill
# the rest may be read-only: compiled kernels and step times are kept in ~/.cache
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HF_HOME=/data/huggingface \
    TRITON_CACHE_DIR=/data/triton \
    TOKENMILL_DATA_DIR=/data
USER tokenmill
WORKDIR /data
VOLUME /data
CMD ["tokenmill", "--help"]
