"""Pictures of evaluations: one module for each kind, each a function that draws a result into a figure of matplotlib.

`drawing` chooses the function and gives SVG and PNG; `style` has what all pictures share: colours that colour-blind
readers can tell apart, numbers with thousands, no window. matplotlib is imported when a picture is drawn.
"""
