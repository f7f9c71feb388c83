"""GPU use, power and temperature: the sampler and the rows, with figures that a test gives; NVML itself needs a GPU."""

import sys
import threading
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch
import torch.distributed as dist

from mmfsdp.kit.run.files.folder import MetricsWriter, read_json, write_json
from mmfsdp.kit.run.files.run_record import RunState, Status
from mmfsdp.kit.run.state import read_ranks
from mmfsdp.kit.train import gpu_sampler
from mmfsdp.kit.train.gpu_sampler import FRESH_S, GpuFigures, Sampler, figures_of, open_nvml, training_gpus, uuid_of
from mmfsdp.kit.widgets.gpu_table import gpu_table
from mmfsdp.kit.widgets.panel import rank_grid
from tests.waiting import until

FIRST, SECOND = "GPU-1", "GPU-2"
FIGURES = {"gpu_use": 0.97, "power_w": 650.5, "temperature_c": 61.0}


@pytest.fixture
def sampled(tmp_path):
    """Return (Sampler of two GPUs that has asked once and asks no more, its file)."""
    path = tmp_path / "gpus" / "rank0.json"
    sampler = Sampler(lambda: {FIRST: FIGURES, SECOND: FIGURES | {"power_w": 100.0}}, path, every_s=1e6)
    sampler.start()
    until(path.exists)
    yield sampler, path
    sampler.close()
    assert not sampler.thread.is_alive()


def test_each_rank_of_a_node_has_the_figures_of_its_own_gpu(sampled):
    sampler, path = sampled
    assert GpuFigures(FIRST, sampler=sampler).after_step(1) == FIGURES
    assert GpuFigures(SECOND, path=path).after_step(1) == FIGURES | {"power_w": 100.0}
    assert GpuFigures("GPU-3", path=path).after_step(1) == {}, "not another's"
    assert GpuFigures(None, sampler=sampler).after_step(1) == {}, "of a slice, nothing"


def test_figures_that_are_old_are_left_out(sampled):
    sampler, path = sampled
    sampler.asked_at -= FRESH_S
    assert GpuFigures(FIRST, sampler=sampler).after_step(1) == {}
    content = read_json(path)
    write_json(path, content | {"time": time.time() - FRESH_S - 1})
    assert GpuFigures(SECOND, path=path).after_step(1) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"time": "x", "gpus": {}}', '{"time": 1e12, "gpus": []}'])
def test_a_file_that_is_damaged_or_missing_gives_no_figures(tmp_path, text):
    path = tmp_path / "rank0.json"
    assert GpuFigures(FIRST, path=path).after_step(1) == {}
    path.write_text(text)
    assert GpuFigures(FIRST, path=path).after_step(1) == {}


def test_an_error_of_the_driver_ends_the_sampler_alone(capsys):
    def ask():
        raise RuntimeError("GPU is lost")

    figures = GpuFigures(FIRST, sampler=Sampler(ask))
    figures.on_train_begin()
    figures.sampler.thread.join(timeout=600)
    assert figures.after_step(1) == {}
    figures.close()
    assert "GPU use is no longer sampled: RuntimeError: GPU is lost" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_does_not_end_it(tmp_path):
    (tmp_path / "gpus").write_text("a file where a folder belongs")
    asked = threading.Semaphore(0)

    def ask():
        asked.release()
        return {FIRST: FIGURES}

    sampler = Sampler(ask, tmp_path / "gpus" / "rank0.json", every_s=0.01)
    sampler.start()
    assert all(asked.acquire(timeout=600) for _ in range(3))
    sampler.close()
    assert sampler.sample == {FIRST: FIGURES}


def test_a_driver_that_does_not_answer_is_not_waited_for():
    answer = threading.Event()
    sampler = Sampler(lambda: {} if answer.wait() else {})
    sampler.start()
    sampler.close()
    assert sampler.thread.is_alive() and sampler.thread.daemon
    answer.set()


class Nvml(SimpleNamespace):
    """Answers as NVML does, in its units; only the conversion of them is tested with it."""

    NVMLError, NVML_TEMPERATURE_GPU = pynvml.NVMLError, pynvml.NVML_TEMPERATURE_GPU
    nvmlDeviceGetUtilizationRates = staticmethod(lambda handle: SimpleNamespace(gpu=97, memory=40))
    nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 650_500)
    nvmlDeviceGetTemperature = staticmethod(lambda handle, sensor: 61)


def test_percents_and_milliwatts_become_shares_and_watts():
    assert figures_of(Nvml(), handle=None) == FIGURES


def test_what_a_gpu_does_not_tell_is_left_out():
    def no_power(handle):
        raise pynvml.NVMLError_NotSupported()

    silent = Nvml(nvmlDeviceGetPowerUsage=no_power)
    assert figures_of(silent, handle=None) == {"gpu_use": 0.97, "temperature_c": 61.0}


def test_a_gpu_that_nvml_does_not_see_has_no_sampler(capsys):
    """Here is no driver; where there is one, no GPU has this UUID."""
    assert open_nvml(["GPU-00000000-0000-0000-0000-000000000000", None]) == (None, [])
    out = capsys.readouterr().out
    assert not out or "GPU use, power and temperature are not known: NVMLError" in out


def test_without_nvidia_ml_py_a_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml([FIRST]) == (None, [])
    assert "pip install 'mmfsdp[gpu]'" in capsys.readouterr().out


def test_a_run_on_cpus_samples_nothing():
    assert training_gpus(SimpleNamespace(device=torch.device("cpu"))) is None


@pytest.mark.parametrize("name, uuid", [("NVIDIA H200", FIRST), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None)])
def test_a_slice_of_a_gpu_is_not_taken_for_the_gpu(monkeypatch, name, uuid):
    """torch's own calls are replaced: there is no GPU here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    assert uuid_of(torch.device("cuda", 0)) == uuid


def test_panel_and_report_show_the_figures_of_each_rank(tmp_path):
    for rank in range(2):
        row = {"step": 7, "mfu": 0.38, "reserved_bytes": 5 << 30, "memory_bytes": 4 << 30}
        MetricsWriter(tmp_path, rank).write(row | (FIGURES if rank == 0 else {}))
    first, second = rank_grid(read_ranks(tmp_path, 2, RunState(Status.RUNNING))).split("rank 1</b>")
    for words in ("MFU 38%", "5 GiB reserved", "GPU 97%", "650 W", "61 °C"):
        assert words in first
    assert "MFU 38%" in second and "°C" not in second, "what is not known is left out"
    assert "650 W" in gpu_table(tmp_path, 2) and gpu_table(tmp_path, 2).count("–") == 3


def test_the_first_rank_of_a_node_samples_what_nvml_sees(monkeypatch, tmp_path):
    """torch and NVML are not asked: there is no GPU here. The group is real, of this process alone."""
    training = SimpleNamespace(device=torch.device("cuda", 0), setup=SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(gpu_sampler, "uuid_of", lambda device: FIRST)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert training_gpus(training) is None, "without NVML"
        monkeypatch.setattr(gpu_sampler, "open_nvml", lambda uuids: (lambda: {FIRST: FIGURES}, list(uuids)))
        figures = training_gpus(training)
    finally:
        dist.destroy_process_group()
    figures.on_train_begin()
    assert until(lambda: figures.after_step(1)) == FIGURES
    figures.close()
    assert not list(tmp_path.iterdir()), "no other rank needs a file"
