"""Answers to tutorial 07. Try yourself first: the checks give hints."""


def step_flops(layers, width, block, vocabulary, batch):
    layer = 2 * 12 * width**2 + 2 * block * width
    token = layers * layer + 2 * width * vocabulary
    return 3 * token * batch * block


def mfu(flops, seconds, compiling, peak):
    return flops / ((seconds - compiling) * peak)


ANSWERS = {
    "work": (2 * 512 * 256 * 1024, 4 * (512 * 256 + 256 * 1024 + 512 * 1024)),
    "bound": "memory",
    "rows": 676,
    "step_flops": step_flops,
    "mfu": mfu,
}
