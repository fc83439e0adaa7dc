"""Logs of power as people have them, and as they should not be: no row counts for what it does not say."""

from datetime import UTC, datetime, timedelta

import pytest

from replayfmt.benchmark.energy.power_log import read_power_log, zone_named
from replayfmt.benchmark.energy.windows import integrate
from replayfmt.errors import UsageError

NOW = 1_700_000_000.0
HEADER = "timestamp, index, power.draw [W]\n"


def written(tmp_path, text):
    path = tmp_path / "power.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "timestamp, index, power.draw [W]\n2023/11/14 22:13:20.000, 0, 45.50 W\n2023/11/14 22:13:21.500, 0, 46.00 W\n",
        "timestamp, index, power.draw [W]\n2023/11/14 22:13:20.000, 0, 45.50\n2023/11/14 22:13:21.500, 0, 46.00\n",
        "2023/11/14 22:13:20.000, 0, 45.50 W\n2023/11/14 22:13:21.500, 0, 46.00 W\n",
        "2023/11/14 22:13:20.000, 0, 45.50\n2023/11/14 22:13:21.500, 0, 46.00\n",
        "timestamp,gpu,power_w\n2023-11-14T22:13:20Z,0,45.5\n2023-11-14T22:13:21.5Z,0,46\n",
        "timestamp,gpu,power_w\n2023-11-14T23:13:20+01:00,0,45.5\n2023-11-14T23:13:21.5+01:00,0,46\n",
        "timestamp,gpu,power_w\n1700000000,0,45.5\n1700000001.5,0,46\n",
        "timestamp_ms,gpu,power_mw\n1700000000000,0,45500\n1700000001500,0,46000\n",
        "timestamp,gpu,power_w\n1700000000000000000,0,45.5\n1700000001500000000,0,46\n",
        "timestamp,device,Average Graphics Package Power (W)\n1700000000,0,45.5\n1700000001.5,0,46\n",
        "gpu,time,power [mW]\n0,1700000000,45500\n0,1700000001.5,46000 mW\n",
        "\ufefftimestamp,gpu,power_w\r\n1700000001.5,0,46\r\n\r\n1700000000,0,45.5\r\n",
    ],
)
def test_logs_are_read_as_people_have_them(tmp_path, text):
    log = read_power_log(written(tmp_path, text), zone=UTC)
    (series,) = log.series.values()
    assert series.times_s.tolist() == [NOW, NOW + 1.5] and series.watts.tolist() == [45.5, 46.0]
    assert list(log.series) == ["0"] and not log.left_out and log.rows == 2


def test_rows_without_a_value_are_counted_and_are_not_zero_watts(tmp_path):
    text = (
        "timestamp, index, power.draw [W]\n2023/11/14 22:13:20, 0, [N/A]\n2023/11/14 22:13:21, 0, 40 W\n"
        "2023/11/14 22:13:22, 0, [Not Supported]\nrubbish, 0, 40 W\n2023/11/14 22:13:23, 0, -3 W\n"
        "2023/11/14 22:13:24, 0\n2023/11/14 22:13:25, 0, forty\ntimestamp, index, power.draw [W]\n"
        "2023/11/14 22:13:19, 0, 41 W\n"
    )
    log = read_power_log(written(tmp_path, text), zone=UTC)
    assert log.series["0"].watts.tolist() == [41, 40]
    assert log.left_out == {"not available": 2, "unreadable": 3, "cut off": 1} and log.out_of_order == 1


def test_local_times_are_those_of_the_zone_and_gpus_are_chosen(tmp_path):
    text = "timestamp,gpu,power_w\n" + "".join(
        f"2023-11-14 23:13:{row}\n" for row in ("20.0,0,10", "20.0,1,20", "21.0,1,30")
    )
    path = written(tmp_path, text)
    assert read_power_log(path, zone=zone_named("Europe/Berlin")).series["0"].times_s.tolist() == [NOW]
    assert read_power_log(path, zone=zone_named("+01:00")).series["0"].times_s.tolist() == [NOW]
    assert read_power_log(path, zone=zone_named("UTC")).series["0"].times_s.tolist() == [NOW + 3600]
    log = read_power_log(path, zone=UTC, gpus=["1"])
    assert list(log.series) == ["1"] and log.series["1"].watts.tolist() == [20, 30]
    with pytest.raises(UsageError, match="have no zone"):
        read_power_log(path)
    with pytest.raises(UsageError, match="no GPU 7 in it; it has 0, 1"):
        read_power_log(path, zone=UTC, gpus=["7"])
    with pytest.raises(UsageError, match="expected UTC"):
        zone_named("Nowhere/AtAll")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("gpu,power_w\n0,45\n", "no column of the power log holds a time"),
        ("timestamp,gpu,clock\n1700000000,0,45\n", "no column of the power log holds a power"),
        ('{"kernels": [\n1, 2]}\n', "is JSON, not the rows of a power log; expected timestamp,gpu"),
        ("device,category,count\n0,a,1\n", r"no line names columns of time and power, and of those without"),
        ("timestamp,gpu,power_w\n1700000000,0,[N/A]\n", r"no row of the power log can be read \(1 not available\)"),
        ("timestamp,gpu,power_w\n12,0,45\n", r"can be read \(1 unreadable\)"),
    ],
)
def test_a_file_that_is_no_power_log_is_one_line(tmp_path, text, words):
    with pytest.raises(UsageError, match=words) as raised:
        read_power_log(written(tmp_path, text), zone=UTC)
    assert "\n" not in str(raised.value)


def at(seconds):
    """A moment after NOW as nvidia-smi writes it, in UTC."""
    return f"{datetime.fromtimestamp(NOW + seconds, UTC):%Y/%m/%d %H:%M:%S.%f}"[:-3]


def rows(count=100, *, row="{time}, 0, {watts:.2f} W\n", watts=lambda index: 50.0 + index):
    return "".join(row.format(time=at(index / 10), watts=watts(index)) for index in range(count))


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        (HEADER + rows(99) + f"{at(9.9)}, 0, 1", {"cut off": 1}),  # of 149 W
        (HEADER + rows(99) + f"{at(9.9)}, 0, 149,5 W\n", {"with more cells than columns": 1}),
        (rows(99) + f"{at(9.9)}, 149.00 W, 0\n", {"without a GPU's index where it is expected": 1}),
        (HEADER + rows(99) + "149.00 W\n", {"cut off": 1}),
        (HEADER + rows(99) + f"{at(9.9)}, 0, 1 MW\n", {"unreadable": 1}),
        (HEADER + rows(99) + f"{at(9.9)}, 0, \u0661\u0664\u0669 W\n", {"unreadable": 1}),
        (HEADER + rows(99) + "0001-01-01 00:00:00, 0, 149 W\n", {"unreadable": 1}),
        (HEADER + rows(99) + "14.11.2023 22:13:29, 0, 149 W\n", {"unreadable": 1}),
        (HEADER + rows(99) + "\0\0\0\n", {"cut off": 1}),
        (("\ufeff" + HEADER + rows(99)).replace("\n", "\r\n"), {}),
        (HEADER + rows(99).replace("0, ", "0,\t"), {}),
    ],
)
def test_a_row_that_may_mean_something_else_is_left_out(tmp_path, text, left_out):
    log = read_power_log(written(tmp_path, text), zone=UTC)
    assert log.left_out == left_out
    assert log.series["0"].watts.tolist() == [50.0 + index for index in range(99)]


def test_a_log_of_powershell_is_read(tmp_path):
    (tmp_path / "power.csv").write_bytes((HEADER + rows()).encode("utf-16"))
    assert len(read_power_log(tmp_path / "power.csv", zone=UTC).series["0"].watts) == 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ((HEADER + rows()).replace(",", ";"), "its columns are separated by ';'; expected commas"),
        ((HEADER + rows()).replace(", ", "\t"), r"its columns are separated by '\\t'"),
        (
            HEADER + rows(row="{time}, 0, 50,{watts:.0f} W\n"),
            "100 with more cells than columns.; the first is line 2: ",
        ),
        (rows(row="{time}, {watts} W, 0\n"), "100 without a GPU's index where it is expected"),
        (
            "timestamp, power.draw [W]\n" + rows(row="{time}, {watts} W\n{time}, 300 W\n"),
            "2 rows each have the same time, or nearly, and no column says which GPU",
        ),
        (
            "timestamp, power.draw [W]\n"
            + "".join(f"{at(i / 10 + gpu / 500)}, {gpu + 100} W\n" for i in range(50) for gpu in range(8)),
            "8 rows each have the same time, or nearly",
        ),
        (
            HEADER + rows() + "".join(f"{at(5 + index / 10)}, 0, 100 W\n" for index in range(100)),
            r"ran backwards by 4\.900 s after 2023-11-14T22:13:29.900000.00:00 \(GPU 0\)",
        ),
    ],
)
def test_a_log_that_may_mean_something_else_is_refused(tmp_path, text, words):
    with pytest.raises(UsageError, match=words) as raised:
        read_power_log(written(tmp_path, text), zone=UTC)
    assert "\n" not in str(raised.value)


def test_rows_in_another_order_are_no_clock_that_ran_backwards(tmp_path):
    later = "".join(f"{at(100 + index / 10)}, 0, 7 W\n" for index in range(50))
    mixed = rows().splitlines(keepends=True)
    mixed = mixed[::-1][::2] + mixed[::2]
    for text in (later + rows(), "".join(mixed)):
        log = read_power_log(written(tmp_path, HEADER + text), zone=UTC)
        assert log.out_of_order and integrate(log, NOW + 1, NOW + 3).joules == pytest.approx(70 * 2)


def test_the_hour_that_a_local_clock_shows_twice_or_never_is_left_out(tmp_path):
    def local(begin, count):
        return "".join(f"{begin + timedelta(minutes=10 * each):%Y-%m-%d %H:%M:%S},0,50\n" for each in range(count))

    berlin = zone_named("Europe/Berlin")
    for hour in (datetime(2026, 10, 25, 1), datetime(2026, 3, 29, 1)):
        path = written(tmp_path, "timestamp,gpu,power_w\n" + local(hour, 18))
        log = read_power_log(path, zone=berlin)
        assert log.left_out == {"in the hour that daylight saving time repeats or leaves out": 6}
        assert len(log.series["0"].watts) == 12


def test_rows_of_one_time_are_one_sample_their_mean(tmp_path):
    text = "".join(f"{at(index // 5)}, {gpu}, {10 * (index % 5)} W\n" for index in range(100) for gpu in range(2))
    log = read_power_log(written(tmp_path, HEADER + text), zone=UTC)
    assert log.same_time == 2 * 80 and log.series["1"].watts.tolist() == [20.0] * 20 and log.interval_s == 1
    assert log.resolution_w == 10  # of what was read, and not of the means
    assert integrate(log, NOW + 2, NOW + 8).joules is None  # 5 samples


@pytest.mark.parametrize("form", ["%s", "%Y-%m-%d %H:%M:%S"])
def test_whole_seconds_that_a_clock_cut_off_count_as_their_middle_with_an_error_of_half_of_them(tmp_path, form):
    def seconds(after):
        when = datetime.fromtimestamp(NOW + after, UTC)
        return int(when.timestamp()) if form == "%s" else when.strftime(form)

    def energy(times, watts):
        lines = "".join(f"{seconds(time)},0,{watts(time)}\n" for time in times)
        log = read_power_log(written(tmp_path, f"timestamp,gpu,power_w\n{lines}"), zone=UTC)
        assert log.whole_seconds
        return integrate(log, NOW + 5, NOW + 25)

    def rise(begins):
        return lambda time: time + 300 * (time >= begins)

    # Ten samples a second: the mean of a second is in its middle, and so the joules of a rise are exact.
    ramp = energy([index / 10 for index in range(300)], lambda time: 100 + 10 * (time + 0.05))
    assert ramp.joules == pytest.approx(20 * (100 + 10 * 15))
    # A sample a second, at any moment of it: the bound holds, for a step at the edge of the window as well.
    for late in (0.0, 0.25, 0.5, 0.999):
        for begins in (15, 24.9):
            found = energy([index + late for index in range(30)], rise(begins))
            assert abs(found.joules - (20 * 15 + 300 * (25 - begins))) <= found.error < 340


def test_a_log_with_a_fraction_of_a_second_in_any_row_is_taken_as_it_is(tmp_path):
    log = read_power_log(written(tmp_path, "timestamp,gpu,power_w\n1700000000,0,45\n1700000001.5,0,46\n"))
    assert not log.whole_seconds and log.series["0"].times_s.tolist() == [NOW, NOW + 1.5]
    milliseconds = written(tmp_path, "timestamp,gpu,power_w\n1700000000000,0,45\n1700000001000,0,46\n")
    assert not read_power_log(milliseconds).whole_seconds


def test_the_error_of_power_that_never_changes_is_what_the_log_writes(tmp_path):
    log = read_power_log(written(tmp_path, HEADER + rows(watts=lambda _: 50.0)), zone=UTC)
    assert log.resolution_w == pytest.approx(0.01)
    assert integrate(log, NOW + 1, NOW + 9).error == pytest.approx(0.005 * 8)
    milliwatts = written(tmp_path, "timestamp,gpu,power_mw\n" + rows(row="{time},0,5e4\n"))
    assert read_power_log(milliwatts, zone=UTC).resolution_w == pytest.approx(10)


def test_what_is_no_file_to_read_is_one_line(tools, tmp_path):
    (tmp_path / "windows.jsonl").write_text("")
    for path in (tmp_path, tmp_path / "none", "/dev/null"):
        with pytest.raises(UsageError, match=r"cannot be read as a power log: (Is a dir|No such file|not a regular)"):
            read_power_log(path, zone=UTC)
    for zone in ("+24:00", "-99:99", "+00:60"):
        with pytest.raises(UsageError, match="expected UTC"):
            zone_named(zone)


@pytest.mark.parametrize(
    ("header", "cells", "column", "others"),
    [
        ("power.draw.average [W], power.draw.instant [W], power.draw [W]", "[N/A], 45.50 W, 90 W",
         "power.draw.instant [W]", 2),
        ("module.power.draw [W], power.draw [W]", "400 W, 45.50 W", "power.draw [W]", 1),
        ("power.draw.average [W], power.draw [W]", "90 W, 45.50 W", "power.draw [W]", 1),
        ("gfx_voltage, power_gfx_voltage, power_socket_power, power_throttle_status", "1, 800, 45.5, ON",
         "power_socket_power", 0),
        ("power.limit [W], power.draw [W], clocks_event_reasons.hw_power_brake_slowdown", "400 W, 45.50 W, Not Active",
         "power.draw [W]", 0),
    ],
)  # fmt: skip
def test_of_several_columns_the_power_of_the_gpu_at_a_moment_is_taken_and_the_others_are_named(
    tmp_path, header, cells, column, others
):
    text = f"timestamp, index, {header}\n" + "".join(f"{at(each / 10)}, 0, {cells}\n" for each in range(3))
    log = read_power_log(written(tmp_path, text), zone=UTC)
    assert log.column == column and len(log.others) == others
    assert log.series["0"].watts.tolist() == [45.5] * 3


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        ("uuid", "GPU-1a", "GPU-2b"),
        ("name, pci.bus_id", "Tesla, 0:04:00.0", "Tesla, 0:05:00.0"),
        ("id, index", "7, 0", "8, 1"),
    ],
)  # fmt: skip
def test_gpus_are_told_apart_by_whatever_names_them(tmp_path, header, first, second):
    rows = "".join(f"{at(each / 10)}, {gpu}, 40 W\n" for each in range(20) for gpu in (first, second))
    log = read_power_log(written(tmp_path, f"timestamp, {header}, power.draw [W]\n{rows}"), zone=UTC)
    assert log.gpus == [first.rpartition(", ")[2], second.rpartition(", ")[2]]


def test_what_is_no_log_at_all_is_refused_with_what_was_expected(tmp_path):
    for text in ("11-14-2023 22:13:20 RAM 2440/3827MB GPU@25C\n" * 9, "# gpu pwr\n    0 40\n"):
        with pytest.raises(
            UsageError, match="no row of the power log can be read .*; expected timestamp,gpu,power_w or"
        ):
            read_power_log(written(tmp_path, text), zone=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "time,id,pm1,sum\n2023-11-14 22:13:20.0,0,45.5,45.5\n2023-11-14 22:13:21.5,1,46,46\n"
        "2023-11-14 22:13:23,2,47,47\n",
        "time,id,pm1,pm2,sum\n1700000000,0,40,5.5,45.5\n1700000001.5,1,40,6,46\n1700000003,2,40,7,47\n",
        "timestamp,id,power\n2023-11-14 22:13:20.0,7,45.5\n2023-11-14 22:13:21.5,8,46\n2023-11-14 22:13:23,9,47\n",
    ],
)
def test_a_column_that_counts_rows_names_no_gpu(tmp_path, text):
    log = read_power_log(written(tmp_path, text), zone=UTC)
    assert list(log.series) == ["0"] and log.series["0"].watts.tolist() == [45.5, 46.0, 47.0]


def test_an_id_that_comes_again_or_at_one_time_is_a_gpus(tmp_path):
    rows = [f"{1_700_000_000 + time},{gpu},{10 * gpu + 5}\n" for time in range(4) for gpu in range(3)]
    assert list(read_power_log(written(tmp_path, "time,id,power_w\n" + "".join(rows))).series) == ["0", "1", "2"]
    assert len(read_power_log(written(tmp_path, "time,id,power_w\n" + "".join(rows[:3]))).series) == 3


def test_the_least_number_of_samples_can_be_set(tmp_path):
    rows = "".join(f"{1_700_000_000 + time},0,50\n" for time in range(8))
    log = read_power_log(written(tmp_path, "time,gpu,power_w\n" + rows))
    assert integrate(log, NOW + 0.5, NOW + 4.5).joules is None
    found = integrate(log, NOW + 0.5, NOW + 4.5, 3)
    assert found.joules == pytest.approx(200) and found.samples == 3
