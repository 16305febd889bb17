"""A scheduler that hooks itself into its optimizer, and so does its copy."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.hooks import RemovableHandle

from equilibria.errors import EquilibriaError


class Hooked:
    """Hooks that survive ``copy.deepcopy`` and pickle: torch's optimizers leave theirs behind.

    A copy is made together with its optimizer and its model, or in one call with them: ``copy.deepcopy((model,
    optimizer, scheduler))``. A subclass says in `_hooks` what to register, and calls `_attach` when it is complete.
    """

    _handles: tuple[RemovableHandle, ...] = ()

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        """Register the hooks."""
        raise NotImplementedError

    def _attach(self) -> None:
        self._handles = self._hooks()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _handles=())
        if state["_handles"]:
            self._attach()

    def __copy__(self) -> NoReturn:
        raise EquilibriaError(
            f"got copy.copy of {type(self).__name__}; expected copy.deepcopy, of it together with the model and the "
            "optimizer: two of them would act on one optimizer"
        )
