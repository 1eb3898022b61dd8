"""The section [engine]: what samples from the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stepladder.recipe.section import Names, Section


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

    @model_validator(mode="after")
    def _of_one_kind(self) -> EngineSection:
        if self.kind == "local":
            extra = sorted(self.model_fields_set - {"kind"})
            given = [key for key in extra if getattr(self, key) != type(self).model_fields[key].get_default()]
            meaningful = [key for key in given if getattr(self, key) not in (None, {})]
            if meaningful:
                raise ValueError(
                    f"engine.{meaningful[0]} = {getattr(self, meaningful[0])!r} says nothing about the local "
                    'engine; set engine.kind = "vllm" or remove it'
                )
            return self
        if (self.python is None) == (self.url is None):
            raise ValueError(
                f'engine.kind = "vllm" needs either engine.python or engine.url; got python={self.python!r} '
                f'and url={self.url!r}. Try python = "/opt/vllm/bin/python"'
            )
        if self.url is not None and self.options:
            raise ValueError(
                f"engine.options = {self.options!r} are for a server that the run starts, but engine.url = "
                f"{self.url!r} runs already; start that server with them and remove them here"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f'engine.url = {self.url!r} is no address; it looks like "http://localhost:8000"'
            )
        return self

    def check_exact(self, exact: bool) -> None:
        """Raise ValueError where the run promises what this engine cannot keep."""
        if exact and self.kind == "vllm":
            raise ValueError(
                'engine.kind = "vllm" cannot repeat a run bit for bit (its floats depend on what shares a '
                "batch), and run.exact = true promises that; set run.exact = false"
            )
