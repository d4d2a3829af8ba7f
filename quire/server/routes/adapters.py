"""Routes that load and unload LoRA adapters while the server runs.

They need --allow-runtime-lora-updating, and a key whose `routes` name them. With
--lora-allowed-folders only folders in these are read, links resolved. What a key of the key file
loads is private to it; what an operator loads is for all, or for the tenant that the body names.
"""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.engine.messages import AdapterLoad
from quire.errors import RequestError, UnknownModel, Unsupported
from quire.server.adapter_resolver import MAX_NAME_CHARS, is_adapter_name
from quire.server.app_state import AppState, get_app_state, get_key_owner
from quire.server.auth.api_keys import KeyOwner, tenant_of
from quire.server.errors import InvalidUserInput
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_body
from quire.server.formats.request_body import RequestBody

router = APIRouter()


class LoadAdapterBody(RequestBody):
    """An adapter to load: its name, and its folder on the server's machine."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    tenant: str | None = Field(None, description="Name of the only key that may use it.")


class UnloadAdapterBody(RequestBody):
    """An adapter to unload."""

    lora_name: str = ""
    lora_int_id: int | None = None
    tenant: str | None = Field(None, description="Name of the key that it is private to.")


BODIES: dict[str, tuple[type[RequestBody], ...]] = {
    "/v1/load_lora_adapter": (LoadAdapterBody,),
    "/v1/unload_lora_adapter": (UnloadAdapterBody,),
}


@router.post("/v1/load_lora_adapter", tags=["adapters"])
async def load_lora_adapter(http: Request) -> Response:
    """Load an adapter, which requests then name as their model."""
    state = _require_updating(http)
    body = await read_body(http, LoadAdapterBody, state.options.max_body_bytes)
    _refuse_unknown(state, body)
    name = body.lora_name
    if not name or not body.lora_path:
        raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
    if not is_adapter_name(name):
        message = f"lora_name must have at most {MAX_NAME_CHARS} printable characters"
        raise InvalidUserInput(message, param="lora_name")
    if name in state.served_model_names:
        message = f"{name!r} is a name of the served model: choose another lora_name"
        raise InvalidUserInput(message, param="lora_name")
    owner = get_key_owner(http)
    allowed = _allowed_folders(state, owner)
    wanted = AdapterLoad(
        name,
        body.lora_path,
        if_loaded="replace" if body.load_inplace else "refuse",
        allowed=allowed,
        remote=allowed is None,
        tenant=_tenant(http, body.tenant),
        max_names=owner.max_adapters,
    )
    try:
        await state.adapters.load(wanted)
    except UnknownModel:
        raise
    except RequestError as error:
        if error.param == "lora_name":
            raise InvalidUserInput(str(error), param="lora_name") from None
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", tags=["adapters"])
async def unload_lora_adapter(http: Request) -> Response:
    """Unload an adapter. Requests that use it run to their end."""
    state = _require_updating(http)
    body = await read_body(http, UnloadAdapterBody, state.options.max_body_bytes)
    _refuse_unknown(state, body)
    name = body.lora_name
    if not name:
        raise InvalidUserInput("'lora_name' must be provided.", param="lora_name")
    if not await state.adapters.unload(name, _tenant(http, body.tenant)):
        message = f"The lora adapter {name!r:.200} cannot be found."
        raise UnknownModel(message, param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _require_updating(http: Request) -> AppState:
    state = get_app_state(http)
    if not state.options.allow_runtime_lora_updating:
        raise HTTPException(
            403,
            "adapters cannot be loaded while the server runs: start with "
            "--allow-runtime-lora-updating or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to allow it",
        )
    if not state.adapters.enabled:
        raise Unsupported("this server serves no adapters: start it with --enable-lora")
    return state


def _allowed_folders(state: AppState, owner: KeyOwner) -> list[str] | None:
    if owner.adapter_folders is not None:
        return list(owner.adapter_folders)
    return list(state.options.lora_allowed_folders) or None


def _tenant(http: Request, given: str | None) -> bytes:
    """Return the tenant whose adapters a request means. Raises InvalidUserInput."""
    owner = get_key_owner(http)
    if not owner.is_operator:
        if given not in (None, owner.name):
            message = f"tenant must be this key's name, {owner.name!r}, got {given!r:.200}"
            raise InvalidUserInput(message, param="tenant")
        return owner.tenant
    if given is None:
        return b""
    tenant = tenant_of(given)
    if tenant not in http.app.state.keys.names:
        message = f"tenant must be a name of the key file, got {given!r:.200}"
        raise InvalidUserInput(message, param="tenant")
    return tenant


def _refuse_unknown(state: AppState, body: RequestBody) -> None:
    if state.options.strict:
        ignored_fields.refuse_unknown(body.ignored_fields())
