"""
Refuses changes that a subclass or a callback makes to AllenNLP's trainer and that would have no
effect, because the engine does that part or has been constructed with it.
"""

from typing import Dict

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.trainer_protocol import overridden

_CONSTRUCTOR = "pass it to the trainer's constructor"
_WORKERS = "'distributed' defines the workers"
_GRADIENTS = "change gradients in a callback's `on_backward`"

FIXED: Dict[str, str] = {
    "clip_gradient": f"write 'trainer.grad_clipping', or {_GRADIENTS}",
    "rescale_gradients": f"write 'trainer.grad_norm', or {_GRADIENTS}",
    "cuda_device": _CONSTRUCTOR,
    "model": _CONSTRUCTOR,
    "optimizer": f"{_CONSTRUCTOR}, and change settings in its `param_groups`",
    "_callbacks": "append to `trainer.callbacks`",
    "_distributed": _WORKERS,
    "_primary": _WORKERS,
    "_rank": _WORKERS,
    "_serialization_dir": _CONSTRUCTOR,
    "_world_size": _WORKERS,
    "_ddp_wrapped_model": "use `trainer.engine`",
    "_grad_clipping": "write 'trainer.grad_clipping'",
    "_grad_norm": "write 'trainer.grad_norm'",
    "_moving_average": "write 'trainer.moving_average'",
    "_scaler": "write 'trainer.grad_scaling'",
    "_use_amp": "write 'trainer.use_amp'",
}
"""The alternative to overriding a method of the trainer or setting an attribute of it."""


def check_trainer(own: type, trainer_class: type) -> None:
    """
    Checks that a subclass of the trainer overrides no method that is never called.

    # Parameters

    own : `type`, required.
        This package's trainer.
    trainer_class : `type`, required.
        A subclass of that trainer.

    # Raises

    `ConfigurationError`
        If the subclass overrides such a method.
    """
    for name in overridden(own, trainer_class, FIXED):
        raise ConfigurationError(
            f"{trainer_class.__name__} overrides '{name}', which the 'deepspeed' trainer doesn't "
            f"call, because the engine does this: {FIXED[name]}."
        )
