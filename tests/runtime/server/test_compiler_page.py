"""The page of the compiler's report, which another process renders."""

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from atomc.runtime.server import operations
from atomc.runtime.server.http.responses import APIError


@pytest.mark.parametrize("read", [True, False])
def test_a_report_that_is_not_rendered_in_time_is_a_503_and_its_process_ends(
    tmp_path, monkeypatch, read
):
    async def report(name):
        return "{}" if read else "x" * 2**20  # more than a pipe holds

    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\n{'cat > /dev/null;' * read} echo $$ > {tmp_path}/pid; exec sleep 60"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(operations, "RENDER_SECONDS", 0.5)
    service = SimpleNamespace(engines=SimpleNamespace(call=report))
    with pytest.raises(APIError, match=r"more than 0\.5 s") as error:
        asyncio.run(asyncio.wait_for(operations.compiler_page(service), 30))
    assert (error.value.status, error.value.code) == (503, "render_timeout")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
