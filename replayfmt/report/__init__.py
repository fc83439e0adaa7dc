"""A capture, and what was measured of it, as one page and as pictures.

`ops` reads the capture's ops as columns, `call_sites` adds them up; `documents` reads the files of measurements and
`measured` what they say of each signature; `timeline`, `probe_results` and `verification` are what their names say.
`pictures` and `tables` hold what is shown as plain values, `contents` decides what that is, in sections.
`plotly_figures` and `plots` draw the pictures, in the page and as files (`plot_files`); `page` puts all together.
Never imports torch.
"""
