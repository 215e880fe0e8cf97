"""GET /openapi.json: the API's own description, where the deployment asks for it to be served."""

from starlette.requests import Request
from starlette.responses import Response

from api.document import PATH, document
from api.errors import json_response
from api.query import read_query
from api.routing import Router
from api.services import Services

router = Router()


@router.get(PATH)
async def get_document(request: Request, services: Services) -> Response:
    read_query(request, {})
    asks_for_keys = services.settings.auth == "keys"
    described = document(request.app.routes, services.door.models, asks_for_keys=asks_for_keys)
    return json_response(described)
