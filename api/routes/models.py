"""GET /v1/models: what a job's body may name as its model, in OpenAI's list form."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import json_response
from api.query import read_query
from api.services import ServicesDep

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request, services: ServicesDep) -> Response:
    read_query(request, {})
    data = [
        {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "tokenmill",
            "max_model_len": model.max_model_len,
        }
        for model in services.door.models.values()
    ]
    return json_response({"object": "list", "data": data})
