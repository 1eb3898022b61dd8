"""The section [engine]: what samples from the policy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import Names, Refusals, Section


class EngineSection(Section):
    """What samples from the policy: the engine in this process, or a vLLM server beside it."""

    kind: Literal["local", "vllm"] = Field(
        "local", description="local: in this process, on the policy's own weights; vllm: a server"
    )
    python: Annotated[str | None, Names("file")] = Field(
        None, description="vllm: the interpreter of an environment with vllm; the run starts a server with it"
    )
    url: str | None = Field(
        None, description="vllm: a server that runs already, such as http://localhost:8000, instead of python"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="vllm: what the server computes in; auto: the policy's type"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="vllm: options of the server that is started, as on its command line, such as "
        "{ max_num_seqs = 64, enforce_eager = true }",
    )
    folder: Annotated[str | None, Names("file")] = Field(
        None,
        description="vllm: where weights are written for the server, a folder that it sees too; without it "
        "a temporary one of this machine",
    )
    start_seconds: float = Field(300.0, gt=0, description="vllm: how long the server may take to start")
    deadline: float = Field(
        120.0, gt=0, description="vllm: seconds without a token for anybody before requests are given up"
    )

    refusals: ClassVar[Refusals] = {
        'engine.{s.of_a_server} says nothing about the local engine; set engine.kind = "vllm" or '
        "remove it": lambda s: s.kind == "local" and s.of_a_server,
        'engine.kind = "vllm" needs either engine.python or engine.url; got python={s.python!r} and '
        'url={s.url!r}. Try python = "/opt/vllm/bin/python"': lambda s: (
            s.kind == "vllm" and (s.python is None) == (s.url is None)
        ),
        "engine.options = {s.options!r} are for a server that the run starts, but engine.url = {s.url!r} "
        "runs already; start that server with them and remove them here": lambda s: (
            s.url is not None and s.options
        ),
        'engine.url = {s.url!r} is not an address; it looks like "http://localhost:8000"': lambda s: (
            s.url is not None and not s.url.startswith(("http://", "https://"))
        ),
    }

    @property
    def of_a_server(self) -> str | None:
        """A key that is set and says something about a server alone, with its value."""
        given = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return min((f"{key} = {value!r}" for key, value in given.items()), default=None)
