"""Time variants of the package in turns: one process per tree, by CUDA graphs, on one GPU.

python tests/trials/__main__.py tests/trials/states.py OUT.json base=TREE new=TREE ... [--only PART] [--rounds 7]

A file of cases has `CASES`: from a name to a function that returns the call and the check of its result.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time


def worker(path, device):
    import torch

    spec = importlib.util.spec_from_file_location("cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    say = lambda **x: (out.write(json.dumps(x) + "\n"), out.flush())
    say(cases=list(module.CASES))
    graph = call = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "prepare" in order:
                graph = call = None
                torch.manual_seed(0)
                call, check = module.CASES[order["prepare"]]()
                began = time.monotonic()
                result = call()
                if device == "cuda":
                    torch.cuda.synchronize()
                compile_s = time.monotonic() - began
                wrong = check(result)
                if device == "cuda":
                    stream = torch.cuda.Stream()
                    with torch.cuda.stream(stream):
                        for _ in range(3):
                            call()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        again = call()
                    graph.replay()
                    torch.cuda.synchronize()
                    wrong = wrong or check(again) and "in a graph: " + check(again)
                say(wrong=wrong, first_s=round(compile_s, 2))
            elif "time" in order:
                run = graph.replay if graph is not None else call
                if device != "cuda":
                    began = time.monotonic()
                    run()
                    say(us=(time.monotonic() - began) * 1e6)
                    continue
                n = order["time"]
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(2):
                    run()
                a.record()
                for _ in range(n):
                    run()
                b.record()
                torch.cuda.synchronize()
                say(us=a.elapsed_time(b) * 1000 / n)
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}"[:400])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases")
    parser.add_argument("out")
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    processes = {}
    for one in asked.trees:
        name, tree = one.split("=")
        path = os.pathsep.join([os.path.abspath(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        processes[name] = subprocess.Popen(
            [sys.executable, __file__, "--worker", os.path.abspath(asked.cases), asked.device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree, env={**os.environ, "PYTHONPATH": path},
        )
    answer = lambda p: json.loads(p.stdout.readline() or '{"error": "died"}')
    tell = lambda p, **x: (p.stdin.write(json.dumps(x) + "\n"), p.stdin.flush())
    names = {name: answer(p).get("cases", []) for name, p in processes.items()}
    cases = [c for c in next(iter(names.values())) if asked.only in c]
    results = {}
    for case in cases:
        row = results[case] = {}
        live = []
        for name, p in processes.items():
            tell(p, prepare=case)
        for name, p in processes.items():
            row[name] = answer(p)
            if "error" not in row[name]:
                live.append(name)
        if live:
            tell(processes[live[0]], time=3)
            one = answer(processes[live[0]])["us"]
            n = max(3, min(200, int(20_000 / one)))
            times = {name: [] for name in live}
            for _ in range(asked.rounds):
                for name in live:
                    tell(processes[name], time=n)
                    times[name].append(answer(processes[name])["us"])
            for name in live:
                row[name] |= {"us": round(statistics.median(times[name]), 2), "least": round(min(times[name]), 2)}
        print(case, {k: v.get("us", v.get("error")) for k, v in row.items()}, {k: v.get("wrong") for k, v in row.items() if v.get("wrong")}, flush=True)
        with open(asked.out, "w") as file:
            json.dump(results, file, indent=1)
    for p in processes.values():
        p.stdin.close()


if __name__ == "__main__":
    worker(*sys.argv[2:4]) if sys.argv[1] == "--worker" else main()
