"""A capture, and what was measured of it, as one page and as pictures.

`ops` reads the capture's ops as columns, `call_sites` adds them up; `documents` reads the files of measurements and
`measured` what they say of each signature; `timeline` and `probe_results` are what their names say. `pictures` and
`tables` hold what is shown as plain values, `contents` decides what that is. `plotly_figures` and `plots` draw the
pictures, in the page and as files; `page` puts everything together. Never imports torch.
"""
