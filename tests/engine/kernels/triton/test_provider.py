"""When the registry takes these kernels, and what it says where it does not."""

import importlib.util
from dataclasses import fields

import pytest
import torch

from engine.kernels import triton
from engine.kernels.registry import REFERENCE, triton_kernels


def test_every_operation_has_a_kernel():
    provided = triton.provide(REFERENCE)
    same = {
        operation.name
        for operation in fields(REFERENCE)
        if getattr(provided, operation.name) is getattr(REFERENCE, operation.name)
    }
    assert not same


@pytest.mark.parametrize(
    ("cuda", "capability", "reason"),
    [
        (None, (9, 0), "this torch is not built for CUDA"),
        ("13.0", (7, 5), "the GPU is older than compute capability 8.0"),
    ],
)
def test_where_they_cannot_run_the_log_says_why(monkeypatch, caplog, cuda, capability, reason):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert triton_kernels(REFERENCE) is REFERENCE
    assert f"slow kernels in use, no compiled ones: {reason}" in caplog.text


def test_without_triton_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_kernels(REFERENCE) is REFERENCE
    assert "triton is not installed" in caplog.text


def test_on_an_ampere_or_later_they_are_taken(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert triton_kernels(REFERENCE) == triton.provide(REFERENCE)
