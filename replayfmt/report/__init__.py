"""A capture, and what was measured of it, as one page and as pictures.

`ops` reads the capture's ops as columns and adds them up; `measurements` reads the files of measurements; `timelines`
has what ran when. `pictures` holds pictures and tables as plain values. `contents` decides what is shown, in sections,
with `kernel_sections` and `probe_section`; for a job's folder `rank_contents` does. `page` and `plots` draw it, as a
page and as files. Never imports torch.
"""
