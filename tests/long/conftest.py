"""Options of the long tests."""


def pytest_addoption(parser):
    parser.addoption("--count", type=int, default=3, help="how often each fault is done (test_faults.py)")
    parser.addoption("--only", default="", help="names of faults, by commas; default: all (test_faults.py)")
    parser.addoption("--anew", action="store_true", help="forget the faults done before (test_faults.py)")
    parser.addoption("--standin", action="store_true", help="two replicas of the stand-in for vLLM (test_faults.py)")
    parser.addoption("--keep", action="store_true", help="leave the lab up (test_faults.py)")
    parser.addoption(
        "--record",
        action="store_true",
        help="write the table to docs/validation (test_faults.py, test_driver_kills.py)",
    )
