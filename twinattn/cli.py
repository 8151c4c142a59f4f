"""The command line: `twinattn demo`, `serve`, `prove`, `search`, `bench`, `explain`, `exercises` and others."""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# A command that reads its own arguments.
OWN: dict[str, Any] = dict(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"twinattn {version('twinattn')}")
        raise typer.Exit


@main.callback()
def about(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Attention for LLM serving, written twice: refattn to read, fastattn to run."""


@main.command()
def demo(
    twin: Annotated[str, typer.Option(help="Which twin computes: refattn, fastattn, or both.")] = "both",
    prompt: Annotated[list[str] | None, typer.Option(help="Your own prompt; may be given several times.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 40,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1 ...")] = "cpu",
    speculate: Annotated[
        str | None, typer.Option(help="Speculative decoding, on texts to repeat: chain or tree.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the cache holds: auto, or quantized: fp8_e4m3, fp8_e5m2, int8, int4, nvfp4.")
    ] = "auto",
    profile: Annotated[
        Path | None, typer.Option(help="Show where the time of a step goes, and draw some steps into this file (.svg).")
    ] = None,
) -> None:
    """Answer prompts with a real model through both twins, and compare their words with transformers' own."""
    from twinattn.engine import demo as module  # late: `--help` does not need torch
    from twinattn.engine.demo_model import MissingModelError
    from twinattn.engine.demo_work import RequestError

    try:
        proven = module.run(
            twin,
            prompt,
            max_tokens=max_tokens,
            device=device,
            speculate=speculate,
            kv_cache_dtype=kv_cache_dtype,
            profile=profile,
        )
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; pip install 'twinattn[bench]' brings what a picture needs", err=True)
        raise typer.Exit(2) from error
    except RequestError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    except (MissingModelError, NotImplementedError, ValueError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(0 if proven else 1)


@main.command()
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="A folder with a model of transformers.", show_default="the demo's model")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    twin: Annotated[str, typer.Option(help="Which twin computes: refattn or fastattn.")] = "fastattn",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1 ...")] = "cpu",
    num_blocks: Annotated[int, typer.Option(min=1, help="Blocks in the pool; few, to see preemption.")] = 256,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.")] = 256,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 64,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the cache holds: auto, or quantized: fp8_e4m3, int8, int4 ...")
    ] = "auto",
    max_waiting: Annotated[int, typer.Option(min=1, help="Most requests that wait; more get 429.")] = 256,
    log_steps: Annotated[bool, typer.Option("--log-steps", help="Log a line per step.")] = False,
) -> None:
    """Serve a model over HTTP to OpenAI's clients, to watch an engine work; not for production."""
    try:
        from twinattn.engine import server as module
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; `pip install -e '.[serve]'` in a clone installs what a server needs", err=True)
        raise typer.Exit(2) from error
    from twinattn.engine.demo_model import MissingModelError

    try:
        module.run(
            model,
            host=host,
            port=port,
            twin=twin,
            device=device,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=kv_cache_dtype,
            max_waiting=max_waiting,
            log_steps=log_steps,
        )
    except (MissingModelError, NotImplementedError, ValueError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


@main.command()
def bench(
    device: Annotated[str, typer.Option(help="What to measure: cpu, cuda, cuda:1 ...")] = "cpu",
    rows: Annotated[list[str] | None, typer.Option(help="Part of a row's name; may be given several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="docs/results")] = None,
    quick: Annotated[bool, typer.Option(help="A smoke test: small and few. Writes only to --out.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Measure the workloads of this file of FlashInfer-Bench. Writes only to --out.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            help="Time fastattn of this other checkout in turns with ours, in place of peers. Writes only to --out."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Of a GPU: rows that are prepared at once, a process each.")] = 1,
) -> None:
    """Measure every path against its peers; wrong answers are not timed."""
    from twinattn import bench as module

    if out is None and not quick and trace is None and not beside:
        out = Path("docs/results")
    try:
        if beside:
            if trace is not None or jobs != 1:
                raise ValueError(f"{'jobs' if trace is None else 'trace'}: expected none with --beside")
            from twinattn.bench import beside as others

            others.run(device, rows or (), beside, out=out, quick=quick, console=module.wide_console())
            return
        module.run(device, rows or (), trace=trace, out=out, quick=quick, jobs=jobs)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


@main.command()
def load(
    temperature: Annotated[list[float] | None, typer.Option(help="Rounds with it; several times.")] = None,
    model: Annotated[str, typer.Option(help="Whose sizes: qwen3-0.6b, qwen3-8b, qwen3-next.")] = "qwen3-0.6b",
    ring: Annotated[list[int] | None, typer.Option(help="Of qwen3-next: inputs in a ring, 0 for none.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="What the cache holds: auto, fp8_e4m3 or int4.")] = "auto",
    rounds: Annotated[int, typer.Option(help="How many with each temperature.")] = 2,
    nano_vllm: Annotated[Path | None, typer.Option(help="A folder with nano-vllm's source, to run beside.")] = None,
    vllm: Annotated[list[str] | None, typer.Option(help="vLLM with this backend beside it; several times.")] = None,
    sglang: Annotated[list[str] | None, typer.Option(help="SGLang with this backend beside it; several times.")] = None,
    graphs: Annotated[str, typer.Option(help="Their CUDA graphs: full, or default for their own choice.")] = "full",
    results: Annotated[Path | None, typer.Option(help="Write the figures into this file (.json).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw some steps into this file (.svg).")] = None,
) -> None:
    """Serve 256 requests at once on a GPU: tokens per second, and how long each waits for its tokens."""
    from rich.console import Console

    from twinattn.bench import load as module

    try:
        module.run(
            Console(),
            temperatures=tuple(temperature or (0.0, 0.6)),
            model=model,
            rings=ring or (),
            kv_cache_dtype=kv_cache_dtype,
            rounds=rounds,
            nano_vllm=nano_vllm,
            vllm=vllm or (),
            sglang=sglang or (),
            graphs=graphs,
            results=results,
            picture=picture,
        )
    except module.LoadError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    except (ValueError, ModuleNotFoundError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


@main.command()
def ladder(
    name: Annotated[str, typer.Argument(help="Which ladder: decode, prefill, latents, states.")] = "decode",
    results: Annotated[Path | None, typer.Option("--json", help="Write what was measured into this file.")] = None,
    file: Annotated[Path | None, typer.Option(help="A changed copy of a rung, to be held to the formula.")] = None,
) -> None:
    """List the steps from the formula to the roofline, one change each; time them on a GPU, check them without one."""
    from twinattn.course import ladder as module

    try:
        all_right = module.run(name, typer.echo, results, file)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    if not all_right:
        raise typer.Exit(1)


@main.command()
def doctor() -> None:
    """List the kernels that run here, what they compute, and why they do not compute the rest."""
    from fastattn import doctor as module

    module.run()


@main.command()
def explain(
    source: Annotated[
        str | None,
        typer.Option(
            help="Which call: decode, split, prefill, window, rows, interval, mla, int8, fp8, sinks.",
            show_default="lists them",
        ),
    ] = None,
) -> None:
    """Print the Triton kernel of a call as the compiler sees it: constants put in, branches decided."""
    from twinattn.course import calls

    if source is None:
        typer.echo(calls.list_calls())
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: no GPU is needed
    try:
        from twinattn.course import explain as module

        typer.echo(module.show(source))
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; `pip install triton` installs it, on Linux alone", err=True)
        raise typer.Exit(2) from error
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


@main.command()
def notebooks(
    folder: Annotated[Path, typer.Argument(help="A new folder for them.")] = Path("notebooks"),
) -> None:
    """Copy the notebooks and the exercises into a folder of yours, to open and to change them there."""
    from twinattn.course import copied as course

    try:
        first = course.copy(folder)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    typer.echo(f"Open the first one by: jupyter lab {first}")


@main.command()
def quantization(
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("docs/results/quantization"),
) -> None:
    """Measure how far 8 and 4 bits move Gaussian keys and values, and those of a real model."""
    from twinattn.bench import quantization_error as module

    try:
        module.run(out)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


@main.command("quantization-quality")
def quantization_quality(
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("docs/results/quantization"),
) -> None:
    """Measure what a real model loses by 8 and by 4 bits: perplexity and KL divergence."""
    from twinattn.bench import quantization_quality as module

    try:
        module.run(out)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error


def _hand_over(module: str, extra: str, arguments: list[str]) -> None:
    """Call `main` of a module with what stands behind a command, and end with its exit status."""
    try:
        command = import_module(module).main
    except ModuleNotFoundError as error:
        typer.echo(f"{error}; `pip install -e '.[{extra}]'` in a clone installs what this command needs", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(command(arguments) or 0)


@main.command(**OWN)
def prove(context: typer.Context) -> None:
    """Check any attention kernel, property by property: yours, a library's, or one of ours."""
    sys.path.insert(0, "")  # a kernel in a file of the current folder, as with `python -m`
    _hand_over("twinattn.kit.__main__", "kit", context.args)


@main.command(**OWN)
def search(context: typer.Context) -> None:
    """Search for wrong answers: random batches of every path and kernel against the reference and an oracle."""
    _hand_over("twinattn.kit.search.command", "kit", context.args)


@main.command(**OWN)
def exercises(context: typer.Context) -> None:
    """Write the functions of a server's attention yourself; each is checked at once."""
    _hand_over("twinattn.course.exercises.__main__", "exercises", context.args)


@main.command(**OWN)
def draw(context: typer.Context) -> None:
    """Draw a batch, a mask or a cascade, as text or as a picture."""
    _hand_over("twinattn.course.drawing.__main__", "exercises", context.args)
