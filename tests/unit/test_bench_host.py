"""What a process uses of its host, against memory that is taken here and /proc files that are made up."""

import mmap

from bigsgan.bench.host import HostPeak, return_unused

MIB = 2**20


def status(directory, resident_kib):
    directory.mkdir(exist_ok=True)
    (directory / "status").write_text(f"Name:\tpython\nVmHWM:\t  99999999 kB\nVmRSS:\t  {resident_kib} kB\n")


def test_a_peak_is_counted_from_its_own_beginning():
    with mmap.mmap(-1, 300 * MIB) as held:
        held.write(bytes(300 * MIB))
    return_unused()
    peak = HostPeak()
    with mmap.mmap(-1, 100 * MIB) as held:
        held.write(b"\1" * 100 * MIB)
    found = peak.peak() - peak.before
    peak.close()
    assert 95 * MIB < found < 250 * MIB  # the write's own bytes are a second copy for a moment


def test_a_peak_is_sampled_where_the_kernel_cannot_begin_anew(tmp_path):
    process = tmp_path / "self"
    status(process, 1000)
    (process / "clear_refs").mkdir()  # which cannot be written
    peak = HostPeak(process)
    status(process, 5000)
    while peak._largest < 5000 * 1024:
        pass
    status(process, 2000)
    assert (peak.before, peak.peak()) == (1000 * 1024, 5000 * 1024)
    peak.close()
    assert not peak._sampler.is_alive()
