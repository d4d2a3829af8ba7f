"""Routes that load and unload LoRA adapters while the server runs.

They need --allow-runtime-lora-updating, and a key whose `routes` name them. With
--lora-allowed-folders only folders in these are read, links resolved.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import UnknownModel, Unsupported
from quire.server.app_state import AppState, get_app_state
from quire.server.errors import InvalidUserInput
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_body
from quire.server.formats.request_body import RequestBody

router = APIRouter()

MAX_NAME_CHARS = 256


class LoadAdapterBody(RequestBody):
    """An adapter to load: its name, and its folder on the server's machine."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterBody(RequestBody):
    """An adapter to unload."""

    lora_name: str = ""
    lora_int_id: int | None = None


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
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        message = f"lora_name must have at most {MAX_NAME_CHARS} printable characters"
        raise InvalidUserInput(message, param="lora_name")
    if name in state.served_model_names:
        message = f"{name!r} is a name of the served model: choose another lora_name"
        raise InvalidUserInput(message, param="lora_name")
    await state.adapters.refresh()
    if state.adapters.find(name) is not None and not body.load_inplace:
        raise InvalidUserInput(
            f"The lora adapter {name!r} has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
            param="lora_name",
        )
    allowed = state.options.lora_allowed_folders
    await state.adapters.load(name, body.lora_path, replace=body.load_inplace, allowed=allowed)
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
    if not await state.adapters.unload(name):
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


def _refuse_unknown(state: AppState, body: RequestBody) -> None:
    if state.options.strict:
        ignored_fields.refuse_unknown(body.ignored_fields())
