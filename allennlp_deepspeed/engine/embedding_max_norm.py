from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch.nn import Module, Parameter

from allennlp_deepspeed.engine.shards import Fragment, Shards, own_partition, whole_shape


class _Table(NamedTuple):
    """
    An embedding's weight whose rows are to have norms of at most `max_norm`, and the first of its
    rows in the vectors that are about the rows of all tables.
    """

    weight: Any
    max_norm: float
    norm_type: float
    start: int
    shape: torch.Size

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.narrow(0, self.start, self.shape[0])


# Those whose engine is up.
_up: "Set[MaxNorm]" = set()


@contextmanager
def lookups_recorded() -> Iterator[None]:
    """
    Within it each `MaxNorm` of the process sees which rows forward passes look up. For the process
    and not for each of them, because they may go in any order.
    """
    renorm = torch.nn.functional._no_grad_embedding_renorm_  # type: ignore[attr-defined]

    def _no_grad_embedding_renorm_(
        weight: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        version = weight._version
        result = renorm(weight, rows, *args, **kwargs)
        for max_norm in _up:
            max_norm.record(weight, rows, weight._version - version)
        return result

    with mock.patch.object(
        torch.nn.functional, "_no_grad_embedding_renorm_", _no_grad_embedding_renorm_
    ):
        yield


class MaxNorm:
    """
    Keeps the rows of embeddings with `max_norm` within it. PyTorch scales those that a forward pass
    looks up, in place, in the weights that the model computes with. The tensors that the optimizer
    steps are others at ZeRO stages 1 to 3 and in half precision, and each rank looks up other rows.
    So it is recorded which rows they look up, and before each step these are scaled in what the
    optimizer steps, all that any rank has looked up.

    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Raises

    `ConfigurationError`
        If an embedding has a `norm_type` that can't be summed over ranks, the optimizer's weights
        are on NVMe, or, at ZeRO stage 3, another layer has the embedding's weight too.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._num_changes: Dict[int, int] = {}
        self._tables = {id(table.weight): table for table in _tables(engine.module)}
        if not self._tables:
            return
        if engine.zero_nvme_offload_optimizer():
            raise ConfigurationError(
                "An embedding has 'max_norm', which needs the weights that the optimizer steps in "
                "memory. Remove it, or write 'cpu' for "
                "deepspeed_config.zero_optimization.offload_optimizer.device."
            )
        if engine.zero_optimization_partition_weights():
            self._refuse_other_users(engine.module)
        self._shards = Shards(engine)
        self._undo = ExitStack()
        for module in engine.module.modules():
            if _has_table(module):
                # A compiled one is run by what was traced with tensors that stand for the weights.
                forward = torch.compiler.disable(module.forward)
                self._undo.enter_context(mock.patch.object(module, "forward", forward))
        *_, last = self._tables.values()
        num_rows = last.start + last.shape[0]
        # Which have been looked up since they were scaled last.
        self._is_looked_up = torch.zeros(num_rows, dtype=torch.uint8, device=engine.device)
        _up.add(self)

    def _refuse_other_users(self, model: Module) -> None:
        """ZeRO-3 gathers a weight again for each layer, without what another has scaled."""
        for name, module in model.named_modules():
            is_shared = any(id(weight) in self._tables for weight in module._parameters.values())
            if is_shared and getattr(module, "max_norm", None) is None:
                raise ConfigurationError(
                    f"The weight of '{name}' is also that of an embedding with 'max_norm', and "
                    "ZeRO stage 3 doesn't show it what the embedding scales. Write "
                    '"deepspeed_config": {"zero_optimization": {"stage": 2}}, or remove '
                    "'max_norm'."
                )

    @property
    def weights(self) -> List[Parameter]:
        return [table.weight for table in self._tables.values()]

    def remove(self) -> None:
        """Records no more."""
        _up.discard(self)
        if self._tables:
            self._undo.close()

    def num_changes(self, weight: torch.Tensor) -> int:
        """How many of the changes that PyTorch has counted of a tensor are embeddings' own."""
        return self._num_changes.get(id(weight), 0)

    def record(self, weight: torch.Tensor, rows: torch.Tensor, num_changes: int) -> None:
        """
        # Parameters

        weight : `torch.Tensor`, required.
            Of any embedding.
        rows : `torch.Tensor`, required.
            Those that a forward pass looks up, a tensor of integers of any shape.
        num_changes : `int`, required.
            That PyTorch has counted while these rows were scaled.
        """
        if id(weight) in self._tables:
            self._tables[id(weight)].of(self._is_looked_up)[rows.flatten()] = 1
            self._num_changes[id(weight)] = self.num_changes(weight) + num_changes

    def forget_trained(self) -> None:
        """
        Forgets the rows that have been looked up in what is trained: the weights from before are
        back.
        """
        for table in self._tables.values():
            if table.weight.requires_grad:
                table.of(self._is_looked_up).zero_()

    @torch.no_grad()
    def apply(self) -> None:
        """
        Scales the rows that have been looked up, in what the optimizer steps. To be called by every
        rank.
        """
        if not self._tables:
            return
        is_looked_up_here = self._is_looked_up.clone()
        self._reduce(self._is_looked_up, dist.ReduceOp.MAX)
        sums = torch.zeros(len(self._is_looked_up), device=self._engine.device)
        sums_of_parts = torch.zeros_like(sums)
        for table in self._tables.values():
            for fragment in self._fragments(table):
                powers = _whole_rows(table, fragment).abs().pow(table.norm_type)
                where = sums_of_parts if self._is_shared(table) else sums
                table.of(where)[_rows(table, fragment)] += powers.sum(dim=1).to(sums.device)
        self._reduce(sums_of_parts, dist.ReduceOp.SUM)
        sums += sums_of_parts
        for table in self._tables.values():
            is_over = self._is_looked_up
            if self._is_scaled_in_forward(table):
                is_over = is_over & ~is_looked_up_here
            # In double precision and with this constant as PyTorch's own function.
            norms = table.of(sums).pow(1 / table.norm_type).double()
            is_scaled = table.of(is_over).bool() & (norms > table.max_norm)
            scales = torch.where(is_scaled, table.max_norm / (norms + 1e-7), 1.0).float()
            for fragment in self._fragments(table):
                _scale(table, fragment, scales)
            if self._is_scaled_in_forward(table):
                self._take_from_rank_0(table)
        self._is_looked_up.zero_()

    def _is_shared(self, table: _Table) -> bool:
        """Whether each rank has a part, and not all."""
        weight = table.weight
        return is_zero_param(weight) or (weight.requires_grad and self._shards.needs_all_ranks)

    def _is_scaled_in_forward(self, table: _Table) -> bool:
        """Whether it is the model's weight itself that counts, whole."""
        if is_zero_param(table.weight):
            return False
        if not table.weight.requires_grad:
            return True
        fragment = self._shards.fragments.get(table.weight)
        return fragment is not None and fragment.master is table.weight

    def _take_from_rank_0(self, table: _Table) -> None:
        """The rounding of a row that was scaled in a forward pass can be another."""
        if dist.get_world_size() > 1:
            rows = table.of(self._is_looked_up).nonzero().flatten()  # the same on every rank
            values = table.weight.data[rows]
            dist.broadcast(values, src=0)
            table.weight.data[rows] = values

    @staticmethod
    def _reduce(tensor: torch.Tensor, operation: Any) -> None:
        if dist.get_world_size() > 1:
            dist.all_reduce(tensor, op=operation)

    def _fragments(self, table: _Table) -> Iterator[Fragment]:
        """This rank's part of what the optimizer steps, or of a frozen weight; if it has any."""
        fragment: Optional[Fragment] = own_partition(table.weight)
        if table.weight.requires_grad:
            fragment = self._shards.fragments.get(table.weight)
        if fragment is not None and fragment.size > 0:
            yield fragment


def _has_table(module: Module) -> bool:
    weight = getattr(module, "weight", None)
    return getattr(module, "max_norm", None) is not None and isinstance(weight, Parameter)


def _tables(model: Module) -> Iterator[_Table]:
    settings: Dict[int, Tuple[float, float]] = {}
    start = 0
    for name, module in model.named_modules():
        if not _has_table(module):
            continue
        weight, max_norm = cast(Parameter, module.weight), cast(float, module.max_norm)
        norm_type = float(getattr(module, "norm_type", 2.0))
        if not 0 < norm_type < float("inf"):
            raise ConfigurationError(
                f'The embedding \'{name}\' has "max_norm": {max_norm} with "norm_type": '
                f"{norm_type}, but the 'deepspeed' trainer sums norms over ranks: write a positive "
                "number."
            )
        is_new = id(weight) not in settings
        if settings.setdefault(id(weight), (max_norm, norm_type)) != (max_norm, norm_type):
            raise ConfigurationError(
                f"The embedding '{name}' shares its weight with another one, which has another "
                "'max_norm' or 'norm_type': write the same for both."
            )
        if is_new:
            shape = whole_shape(weight)
            yield _Table(weight, float(max_norm), norm_type, start, shape)
            start += shape[0]


def _rows(table: _Table, fragment: Fragment) -> slice:
    """The rows of which a fragment has something."""
    dimension = table.shape[1]
    end = fragment.offset + fragment.size
    return slice(fragment.offset // dimension, -(-end // dimension))


def _elements(fragment: Fragment) -> torch.Tensor:
    # A copy of a transposed weight, which no optimizer's shard is.
    return fragment.master.data.reshape(-1).narrow(0, fragment.start, fragment.size)


def _whole_rows(table: _Table, fragment: Fragment) -> torch.Tensor:
    """The elements of a fragment in rows, with zeros for those that it lacks."""
    # Shape: (num_rows, embedding_dim)
    dimension = table.shape[1]
    end = fragment.offset + fragment.size
    lacking = (fragment.offset % dimension, -end % dimension)
    return torch.nn.functional.pad(_elements(fragment).float(), lacking).view(-1, dimension)


def _scale(table: _Table, fragment: Fragment, scales: torch.Tensor) -> None:
    if fragment.master.shape == table.shape:
        fragment.master.data.mul_(scales.unsqueeze(1).to(fragment.master.device))
        return
    dimension = table.shape[1]
    rows = scales[_rows(table, fragment)].unsqueeze(1).expand(-1, dimension).flatten()
    elements = _elements(fragment)
    factors = rows.narrow(0, fragment.offset % dimension, fragment.size)
    elements.mul_(factors.to(elements.device))
