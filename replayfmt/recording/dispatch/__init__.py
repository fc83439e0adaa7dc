"""Every operator call of the program, as a dispatch mode or the native hook sees it.

`mode` receives the call, and handles operators with rules of their own (`native_mode`: from the hook).
`whole_composites` makes composite operators of other packages reach the recorder whole, `custom_operators` records
operators written in Python according to what happens inside, and reports those whose work bypassed the recorder.
"""
