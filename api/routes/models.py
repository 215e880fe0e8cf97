"""GET /v1/models: what a job's body may name as its model, in OpenAI's list form."""

from fastapi import APIRouter
from starlette.responses import Response

from api.errors import json_response
from api.services import ServicesDep

router = APIRouter()


@router.get("/v1/models")
async def list_models(services: ServicesDep) -> Response:
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
