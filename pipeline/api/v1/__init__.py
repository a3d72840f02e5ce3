"""The JSON endpoints under /v1."""

from fastapi import APIRouter

from pipeline.api.v1 import me, tokens

router = APIRouter(prefix="/v1")
router.include_router(me.router)
router.include_router(tokens.router)
