"""Answers to tutorial 02. Try yourself first: the checks give hints."""

import jax.numpy as jnp


def j0(x):
    return jnp.sinc(x / jnp.pi)


def laguerre(x, n):
    last, this = jnp.ones_like(x), 1 - x
    for k in range(1, n):
        last, this = this, ((2 * k + 1 - x) * this - k * last) / (k + 1)
    return this


ANSWERS = {"launches": 2, "j0": j0, "both_work": (True, True), "laguerre": laguerre}
