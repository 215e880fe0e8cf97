"""GET /v1/models and /v1/models/{id}: what a body may name as its model, in OpenAI's form."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.door import ServedModel
from api.errors import NotFound, json_response
from api.query import read_query
from api.routing import Router
from api.services import Services

router = Router()


@router.get("/v1/models")
async def list_models(request: Request, services: Services) -> Response:
    read_query(request, {})
    data = [_object(model) for model in services.door.models.values()]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request, services: Services) -> Response:
    read_query(request, {})
    model = services.door.models.get(model_id)
    if model is None:
        raise NotFound(
            f"model {model_id[:100]!r} is not served here", param="model", code="model_not_found"
        )
    return json_response(_object(model))


def _object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tokenmill",
        "max_model_len": model.max_model_len,
        "fingerprint": model.fingerprint,
    }
