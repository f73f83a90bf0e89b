"""Style of all images: 7 inches wide with 12-point letters, readable on a phone, on white for both colour schemes."""

import matplotlib.pyplot as plt

WIDTH = 7.0
STOCK, OURS, HOST = "#8c8c8c", "#f58518", "#fbd3a8"

plt.switch_backend("Agg")  # images go to files
plt.rcParams.update({"font.size": 12, "figure.facecolor": "white"})


def new_axes(height: float, panels: int = 1) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, axes = plt.subplots(panels, 1, figsize=(WIDTH, height), layout="constrained", squeeze=False)
    for panel in axes[:, 0]:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:, 0])
