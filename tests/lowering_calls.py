"""What the tests of the lowerings share: seeded data, and a list of calls that are compared as one program."""

import torch
from lowering_check import check_all


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Calls(list):
    """Calls to compare, each answered by PyTorch at once so that a backward gets what its forward saved."""

    def __call__(self, overload, *args, **kwargs):
        self.append((overload, args, kwargs))
        return overload(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)

    def check(self, size=60, **tolerance):
        assert self
        for i in range(0, len(self), size):
            check_all(self[i : i + size], **tolerance)
