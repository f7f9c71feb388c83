"""install.py on a cluster, and into a Python that is there: the site's torch, one index for torch, a wheelhouse; with
real pip and small wheels."""

import contextlib
import functools
import http.server
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1"
dependencies = ["torch>=2.11", "torchvision"]
"""
BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n"
                       "Requires-Dist: torch>=2.11\\nRequires-Dist: torchvision\\n")
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return "small-1-py3-none-any.whl"

build_editable = build_wheel
"""

HIDES = """
import sys
sys.path[:] = [path for path in sys.path if not path.endswith("-packages") or "/project/.venv/" in path]
"""
"""A sitecustomize.py that leaves a Python no packages but those of .venv."""


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel with a module of that name and nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files = [f"{name}/__init__.py", *(f"{about}/{file}" for file in ("METADATA", "WHEEL", "RECORD"))]
        wheel.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in files))


@pytest.fixture
def index(tmp_path):
    """Two indexes of wheels on this machine: `pypi` has the newest torch, `site` an older one, for its GPUs."""
    for name, torch in (("pypi", "2.14.0"), ("site", "2.12.0+site")):
        public = torch.partition("+")[0]
        make_wheel(tmp_path / name / "torch", "torch", torch, "sympy")
        make_wheel(tmp_path / name / "torchvision", "torchvision", torch.replace("2.", "0.", 1), f"torch=={public}")
    make_wheel(tmp_path / "pypi/sympy", "sympy", "1.0")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.func.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class Tunnel(http.server.BaseHTTPRequestHandler):
    """A proxy by which a host is a port of this machine."""

    port, hosts = 0, list[str]()

    def do_CONNECT(self):
        self.hosts.append(self.path)
        self.send_response(200)
        self.end_headers()
        with socket.create_connection(("127.0.0.1", self.port)) as there:
            back = threading.Thread(target=hand_on, args=(there, self.connection), daemon=True)
            back.start()
            hand_on(self.connection, there)
            back.join()

    def log_message(self, *_):
        pass


def hand_on(source: socket.socket, target: socket.socket) -> None:
    """Send on what comes until there is no more."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def pytorch_org(tmp_path):
    """download.pytorch.org on this machine, with builds for CPUs: its hosts that were asked for, and pip's settings."""
    folder, key, certificate = tmp_path / "pytorch_org", tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_wheel(folder / "whl/cpu/torch", "torch", "2.13.0+cpu", "sympy")
    make_wheel(folder / "whl/cpu/torchvision", "torchvision", "0.13.0+cpu", "torch==2.13.0")
    names = ["-subj", "/CN=download.pytorch.org", "-addext", "subjectAltName=DNS:download.pytorch.org"]
    kind = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", "-x509", *kind, *names], check=True, capture_output=True)
    site = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    tunnel = type("ToSite", (Tunnel,), {"port": site.server_port, "hosts": []})
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), tunnel)
    for server in (site, proxy):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tunnel.hosts, {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_port}", "PIP_CERT": str(certificate)}
    for server in (site, proxy):
        server.shutdown()


@pytest.fixture
def install(tmp_path, index):
    """Copies install.py beside a small project, and runs it with a Python of its own."""
    for name in ("site_python", "project"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "install.py", tmp_path / "project")
    (tmp_path / "project/pyproject.toml").write_text(PROJECT)
    (tmp_path / "project/backend.py").write_text(BACKEND)
    # The Python of these tests may have a torch, too: it is not the site's.
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/sitecustomize.py").write_text(HIDES)
    settings = {"PIP_INDEX_URL": f"{index}/pypi", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    settings |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "bare")}

    def run(*words: str, fresh: bool = False, **variables: str) -> str:
        if fresh:
            shutil.rmtree(tmp_path / "project/.venv", ignore_errors=True)
        command = [sys.executable, "install.py", *words]
        done = subprocess.run(
            command, cwd=tmp_path / "project", env=settings | variables, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            return f"stopped: {done.stderr.strip()}"
        asked = [
            tmp_path / "project/.venv/bin/python",
            "-c",
            "import torch; from importlib.metadata import version as v; "
            "print(v('torch'), v('torchvision'), v('small'), torch.__file__)",
        ]
        return subprocess.run(asked, env=settings | variables, capture_output=True, text=True).stdout or done.stdout

    return run


def test_torch_is_the_sites_or_of_one_index_and_a_wheelhouse_needs_no_network(install, index, pytorch_org, tmp_path):
    away = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    unreachable = install("--cpu", HTTPS_PROXY="http://127.0.0.1:9")
    assert "https://download.pytorch.org/whl/cpu cannot be reached" in unreachable, unreachable
    wrong = install("--torch-index", f"{index}/none")
    assert f"{index}/none cannot be reached, or has no torch and torchvision" in wrong, wrong
    assert "finds no torch with torchvision" in install("--system-torch")
    assert install("--torch-index", f"{index}/site").startswith("2.12.0+site 0.12.0+site 1 "), (
        "and sympy of the default"
    )
    assert ".venv has a torch of its own already" in install("--system-torch")
    # The module of a site puts its packages on the path.
    module = {"PYTHONPATH": f"{tmp_path}/bare:{tmp_path}/site_python"}
    for package in ("torch", "torchvision"):
        (wheel,) = (tmp_path / "site" / package).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(tmp_path / "site_python")
    kept = install("--system-torch", fresh=True, **module)
    assert kept.startswith("2.12.0+site 0.12.0+site 1 ") and str(tmp_path / "site_python") in kept, kept
    (tmp_path / "site_python/torch-2.12.0+site.dist-info").rename(tmp_path / "site_python/torch-2.4.0.dist-info")
    about = tmp_path / "site_python/torch-2.4.0.dist-info/METADATA"
    about.write_text(about.read_text().replace("2.12.0+site", "2.4.0"))
    old = install("--system-torch", **module)
    assert "torch is 2.4.0 here, and this needs torch>=2.11" in old, old
    wheelhouse = str(tmp_path / "wheelhouse")
    install("--download", wheelhouse, "--torch-index", f"{index}/site")
    assert sorted(path.name.partition("-")[0] for path in Path(wheelhouse).iterdir()) == [
        "sympy",
        "torch",
        "torchvision",
    ]
    offline = install("--from", wheelhouse, fresh=True, **away)
    assert offline.startswith("2.12.0+site 0.12.0+site 1 "), offline
    assert "not allowed with argument" in install("--cpu", "--system-torch")
    hosts, settings = pytorch_org
    on_cpus = install("--cpu", **settings)
    assert on_cpus.startswith("2.13.0+cpu 0.13.0+cpu 1 "), f"in place of the one that was there: {on_cpus}"
    assert hosts and set(hosts) == {"download.pytorch.org:443"}


def test_here_keeps_the_torch_that_is_there_or_says_why_it_cannot(install, index, tmp_path):
    """The Python that runs it has pip and whatever the test has put there."""
    env, python = tmp_path / "env", tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    (packages,) = env.glob("lib/*/site-packages")

    def here(*words: str, prefix: str = "", **variables: str) -> str:
        settings = {"PIP_INDEX_URL": f"{index}/pypi", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
        command = [python, "install.py", "--here", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path / "project",
            env=settings | {"PATH": "/usr/bin:/bin", "PIP_QUIET": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.stdout if done.returncode == 0 else f"stopped: {done.stderr.strip()}"

    def put(package: str, version: str) -> None:
        make_wheel(tmp_path / "put", package, version)
        for old in packages.glob(f"{package}-*"):
            shutil.rmtree(old)
        zipfile.ZipFile(tmp_path / f"put/{package}-{version}-py3-none-any.whl").extractall(packages)

    for words, answer in (
        (("--system-torch",), "--system-torch makes no sense with --here"),
        (("--download", "wheels"), "--download makes no sense with --here"),
        (("--prefix", "/opt"), "--prefix says where the kernel of --kernel NAME is"),
        (("--kernel", "my kernel"), "is no name of a kernel"),
    ):
        assert answer in here(*words), words
    put("torch", "2.10.1+site")
    assert "torch is 2.10.1+site here, and this needs torch>=2.11. It is not replaced" in here()
    put("torch", "2.12.0+site")
    assert "torch 2.12.0+site is here, without torchvision" in here()
    put("torchvision", "0.12.0+site")
    assert "--here keeps torch 2.12.0+site" in here("--torch-index", f"{index}/site")
    before = times(packages, "torch*/*")
    assert here() == "Installed: this Python imports small now.\n"
    assert times(packages, "torch*/*") == before and len(before) == 8
    assert not (tmp_path / "project/.venv").exists() and list(packages.glob("small-1.dist-info"))
    for name in ("torch", "torchvision"):
        shutil.rmtree(packages / name)
        shutil.rmtree(next(packages.glob(f"{name}-*")))
    assert "imports small now" in here(), "and takes the newest torch where there is none"
    assert (packages / "torch-2.14.0.dist-info").is_dir() and (packages / "sympy").is_dir()


def times(folder: Path, pattern: str) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.glob(pattern)}
