"""An optimizer whose parameters are updated through proxies, which another optimizer works on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

Groups = list[dict[str, Any]]
Make = Callable[[Groups, Collection[torch.Tensor]], torch.optim.Optimizer]
"(parameter groups, parameters that need 32-bit states) -> the recipe's optimizer."


class ProxyOptimizer(torch.optim.Optimizer):
    """An optimizer that updates a proxy of each parameter with an inner optimizer.

    The inner optimizer does the arithmetic and saves its own states. This optimizer presents its states and
    settings as states and settings of the parameters, so a checkpoint does not contain the proxies.
    """

    def __init__(
        self,
        groups: Groups,
        wide: Collection[torch.Tensor],
        make: Make,
        proxy: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(groups, {})
        self.proxies = {p: proxy(p) for group in groups for p in group["params"]}
        of_proxies = [{**group, "params": [self.proxies[p] for p in group["params"]]} for group in groups]
        self.inner = make(of_proxies, [self.proxies[p] for p in wide if p in self.proxies])

    def state_dict(self) -> dict[str, Any]:
        self.update_inner()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states and settings. Load the parameters first: proxies may be copies of them."""
        self.inner.load_state_dict(state_dict)
        self._loaded()
        self.expose_inner()

    def _loaded(self) -> None:
        """Called after the inner optimizer has loaded states."""

    def _pairs(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Yield (group of the proxy, parameter, proxy)."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for p, proxy in zip(group["params"], inner["params"], strict=True):
                yield inner, p, proxy

    def update_inner(self) -> None:
        """Copy this optimizer's settings, such as the learning rate, to the inner optimizer."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def expose_inner(self) -> None:
        """Expose the inner optimizer's settings and states as belonging to the parameters."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        for _, p, proxy in self._pairs():
            if self.inner.state.get(proxy):
                self.state[p] = self.inner.state[proxy]
