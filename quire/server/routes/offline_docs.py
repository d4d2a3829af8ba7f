"""/docs without outside scripts (--enable-offline-docs): the OpenAPI document as one plain page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

JsonObject = Mapping[str, Any]

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}code{font-family:ui-monospace,monospace}"
    "td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}"
    "details{margin:.3rem 0}summary{cursor:pointer}"
)


def render_docs_page(document: JsonObject) -> str:
    """The page of a document."""
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    routes = "\n".join(_render_routes(document))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>Every route, and the fields of its body. The same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>\n{routes}</html>'
    )


def _render_routes(document: JsonObject) -> Iterator[str]:
    for path, methods in sorted(document["paths"].items()):
        for method, route in methods.items():
            name = f"<code>{method.upper()} {html.escape(path)}</code>"
            about = html.escape(route.get("description") or route.get("summary", ""))
            bodies = "".join(_render_body(document, route))
            yield f"<details><summary>{name} {about}</summary>{bodies}</details>"


def _render_body(document: JsonObject, route: JsonObject) -> Iterator[str]:
    for content in route.get("requestBody", {}).get("content", {}).values():
        for schema in content["schema"].get("anyOf", [content["schema"]]):
            found = _resolve_ref(document, schema)
            needed = found.get("required", [])
            rows = "".join(
                _render_field(document, name, field, is_needed=name in needed)
                for name, field in found.get("properties", {}).items()
            )
            yield f"<h3>{html.escape(found.get('title', 'body'))}</h3><table>{rows}</table>"


def _render_field(document: JsonObject, name: str, field: JsonObject, *, is_needed: bool) -> str:
    kind = html.escape(_type_name(document, field))
    about = html.escape(field.get("description", ""))
    mark = " (required)" if is_needed else ""
    return f"<tr><td><code>{html.escape(name)}</code>{mark}<td>{kind}<td>{about}"


def _type_name(document: JsonObject, field: JsonObject) -> str:
    if "anyOf" in field:
        kinds = [_type_name(document, one) for one in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        return str(_resolve_ref(document, field).get("title", "object"))
    if field.get("type") == "array":
        return f"list of {_type_name(document, field.get('items', {}))}"
    return str(field.get("type", "anything"))


def _resolve_ref(document: JsonObject, schema: JsonObject) -> JsonObject:
    if "$ref" not in schema:
        return schema
    found: JsonObject = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found
