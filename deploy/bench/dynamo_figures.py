"""Dynamo 1.6.1's own replay of two Mooncake traces: 8 workers, block 64, 16,384 blocks each, no transfer time.

Replayed once with its offline simulator (aisimulate, wheel 1.6.1), round_robin and kv_router; TTFT and ITL in ms.
"""

import msgspec


class Cell(msgspec.Struct, frozen=True):
    """One trace at one speed on one fleet."""

    trace: str
    speed: float
    num_prefill: int
    num_decode: int

    @property
    def name(self) -> str:
        return f"{self.trace} {self.speed:g}x {self.num_prefill}P{self.num_decode}D"


class Figures(msgspec.Struct, frozen=True):
    ttft_mean: float
    ttft_p99: float
    itl_mean: float
    itl_p99: float
    reuse: float


FIGURES: dict[Cell, dict[str, Figures]] = {
    Cell("conversation", 1.0, 4, 4): {
        "round_robin": Figures(499.29, 2461.15, 7.78, 14.20, 0.08),
        "kv": Figures(387.78, 1804.65, 7.58, 11.53, 0.17),
    },
    Cell("conversation", 1.0, 6, 2): {
        "round_robin": Figures(385.94, 2154.19, 10.36, 19.67, 0.08),
        "kv": Figures(289.45, 1663.43, 10.21, 17.55, 0.21),
    },
    Cell("conversation", 2.0, 4, 4): {
        "round_robin": Figures(554.28, 2556.35, 10.16, 19.91, 0.08),
        "kv": Figures(414.04, 1874.19, 9.73, 14.84, 0.16),
    },
    Cell("conversation", 2.0, 6, 2): {
        "round_robin": Figures(420.42, 2289.22, 18.90, 29.87, 0.08),
        "kv": Figures(307.35, 1678.82, 18.76, 27.09, 0.21),
    },
    Cell("synthetic", 1.0, 4, 4): {
        "round_robin": Figures(355.12, 1925.36, 6.37, 9.35, 0.12),
        "kv": Figures(223.79, 1172.00, 6.27, 8.51, 0.36),
    },
    Cell("synthetic", 1.0, 5, 3): {
        "round_robin": Figures(334.31, 1745.40, 6.50, 9.38, 0.10),
        "kv": Figures(205.29, 1161.63, 6.40, 8.71, 0.42),
    },
    Cell("synthetic", 1.0, 6, 2): {
        "round_robin": Figures(312.81, 1535.16, 6.80, 10.27, 0.12),
        "kv": Figures(191.66, 1150.70, 6.71, 9.44, 0.46),
    },
    Cell("synthetic", 2.0, 4, 4): {
        "round_robin": Figures(597.30, 4010.97, 6.77, 10.60, 0.12),
        "kv": Figures(253.63, 1290.20, 6.61, 8.84, 0.34),
    },
    Cell("synthetic", 2.0, 6, 2): {
        "round_robin": Figures(385.87, 2367.24, 7.78, 12.92, 0.12),
        "kv": Figures(203.37, 1150.85, 7.66, 11.39, 0.44),
    },
}
