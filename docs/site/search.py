"""
Asks the built site's search questions in the words of the field: `python -m docs.site.search site`.
Prints those whose answer isn't the first result, and exits with 1 if there are any. Runs the search
script that the browser runs, in QuickJS.
"""

import json
import sys
from pathlib import Path
from typing import Iterator, List

ANSWERS = {
    "automatic batch size": "global_batch.html",
    "breakpoint": "debugging.html",
    "compare with gradient_descent": "comparing.html",
    "contrastive learning large batch": "contrastive.html",
    "convert checkpoint to fp32": "recovery.html",
    "CPU offload": "large_models.html",
    "DDP": "moving_from_gradient_descent.html",
    "DeepSpeedCheckpointer": "api/checkpoint.html",
    "early stopping": "moving_from_gradient_descent.html",
    "restarts torchrun": "several_machines.html",
    "export to Hugging Face": "language_models.html",
    "fine-tune LLM with LoRA": "language_models.html",
    "flash attention": "behaviour.html",
    "freeze layers": "moving_from_gradient_descent.html",
    "FSDP": "moving_from_fairscale.html",
    "gradient accumulation": "communication.html",
    "gradient checkpointing": "large_models.html",
    "gradient clipping": "configuration.html",
    "gradient_synchronization": "reference.html",
    "hang": "troubleshooting.html",
    "hyperparameter search": "python.html",
    "install": "install.html",
    "learning rate scheduler": "moving_from_gradient_descent.html",
    "LoRA": "language_models.html",
    "mixed precision": "configuration.html",
    "multi-node": "several_machines.html",
    "out of memory": "large_models.html",
    "per-GPU batch size": "moving_from_gradient_descent.html",
    "preemption": "several_machines.html",
    "profiling": "profiling.html",
    "restart after failure": "several_machines.html",
    "resume on more GPUs": "recovery.html",
    "resume training": "recovery.html",
    "sequence parallelism": "long_sequences.html",
    "SFTConfig": "moving_from_other_trainers.html",
    "slurm": "several_machines.html",
    "sparse attention": "sparse_attention.html",
    "several seeds": "questions.html",
    "tensorboard": "questions.html",
    "torch.compile": "compile.html",
    "torchrun": "several_machines.html",
    "wandb": "behaviour.html",
    "ZeRO stage": "moving_from_gradient_descent.html",
    "zero_3_offload": "configuration.html",
}

# What the script expects of a browser.
_BROWSER = """
var self = globalThis, console = {warn: () => {}}, handle, response;
var addEventListener = (type, listener) => { handle = listener; };
var postMessage = message => { response = message; };
"""
_SETUP, _QUERY = 0, 2  # types of messages


class Search:
    """
    The search of a built site.

    # Parameters

    site : `Path`, required.
        The directory with the site.
    """

    def __init__(self, site: Path) -> None:
        import quickjs

        (script,) = site.glob("assets/javascripts/workers/search.*.min.js")
        self._context = quickjs.Context()
        self._context.eval(_BROWSER + script.read_text())
        # As pages that are opened from disk load it.
        self._context.eval((site / "search/search_index.js").read_text())
        self._send(_SETUP, "{...__index, options: {suggest: false}}")

    def pages(self, question: str) -> List[str]:
        """Returns the pages found, best first."""
        self._send(_QUERY, json.dumps(question))
        found = "JSON.stringify(response.data.items.map(results => results[0].location))"
        return [location.partition("#")[0] for location in json.loads(self._context.eval(found))]

    def _send(self, kind: int, data: str) -> None:
        self._context.eval(f"handle({{data: {{type: {kind}, data: {data}}}}})")
        while self._context.execute_pending_job():
            pass


def problems(site: Path) -> Iterator[str]:
    """Yields a line for each question whose answer is not the first result."""
    search = Search(site)
    for question, answer in ANSWERS.items():
        pages = search.pages(question)
        if pages[:1] != [answer]:
            yield f"search for '{question}': {answer} isn't first, but {', '.join(pages[:3])}"


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or 0)
