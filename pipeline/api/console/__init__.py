"""The pages of the operator console."""

from fastapi import APIRouter

router = APIRouter()
