"""The machine's part of the context, read from a made-up /sys and /proc."""

import os

import pytest

from replayfmt.benchmark.machine import frequency_scaling, machine_context

CPU0 = "sys/devices/system/cpu/cpu0"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def cache(index, **files):
    return {f"{CPU0}/cache/index{index}/{name}": text + "\n" for name, text in files.items()}


def test_what_the_machine_tells_is_read(tmp_path):
    write(
        tmp_path,
        {
            **cache(0, type="Data", level="1", size="48K", shared_cpu_map="00000000,00000003"),
            **cache(3, type="Unified", level="3", size="32M", shared_cpu_map="f"),
            "proc/self/personality": "00040000\n",
            "proc/loadavg": "0.50 1.25 2.00 1/234 5678\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 2596.096\n",
        },
    )
    context = machine_context(tmp_path)
    assert context["caches"] == [
        {"type": "Data", "level": 1, "size": 49152, "num_sharing": 2},
        {"type": "Unified", "level": 3, "size": 33554432, "num_sharing": 4},
    ]
    assert context["load_avg"] == [0.5, 1.25, 2.0] and context["mhz_per_cpu"] == 2596
    assert context["aslr_enabled"] is False
    assert context["num_cpus"] == os.cpu_count()
    assert "cpu_scaling_enabled" not in context


def test_what_the_machine_does_not_tell_is_absent(tmp_path):
    assert set(machine_context(tmp_path)) == {"date", "host_name", "executable", "num_cpus"}


@pytest.mark.parametrize(
    "governors, scaling", [(["performance", "performance"], False), (["performance", "powersave"], True), ([], None)]
)
def test_frequency_scaling_is_on_where_a_processor_has_another_governor_than_performance(tmp_path, governors, scaling):
    for number, governor in enumerate(governors):
        write(tmp_path, {f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor": governor + "\n"})
    assert frequency_scaling(tmp_path) is scaling


def test_the_nominal_frequency_is_preferred_to_the_present_one(tmp_path):
    write(tmp_path, {f"{CPU0}/cpufreq/cpuinfo_max_freq": "3400000\n", "proc/cpuinfo": "cpu MHz\t\t: 800.0\n"})
    assert machine_context(tmp_path)["mhz_per_cpu"] == 3400
