"""Non-tensor state that results depend on: `randomness` (generators), `numeric_state` (global settings), `autocast`
(autocast and autograd below the mode).
"""
