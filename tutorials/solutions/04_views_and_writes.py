"""Answers to tutorial 04. Try yourself first: the checks give hints."""


def scale_column(x, j, factor):
    x[:, j] *= factor


def normalise(x):
    x -= x.mean(1, keepdim=True)
    x /= x.abs().amax(1, keepdim=True)
    return x


ANSWERS = {
    "launches_views": 0,
    "shares": (True, True, False, False),
    "bytes_copied": 524_288,
    "scale_column": scale_column,
    "normalise": normalise,
}
