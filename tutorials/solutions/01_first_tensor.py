"""Answers to tutorial 01. Try yourself first: the checks give hints."""


def double(x):
    return x.to("tpu") * 2


def gradient(w, x, y):
    loss = (x @ w - y).square().mean()
    loss.backward()
    return w.grad


ANSWERS = {"double": double, "ops": 4, "bytes_back": 4, "written": "bf16[3]", "gradient": gradient}
