#!/usr/bin/env python3
"""Compares speed with llama.cpp on the same GGUF files, in alternating rounds: the table of docs/performance.md.

    tests/compare_speed.py --ours target/release/pellucid --theirs "COMMAND OF LLAMA.CPP" MODEL.gguf...

--theirs is a command that takes MODEL --prompt 512,2048 --parallel 1,8 --depth 0 --generate N --repeat N --threads N
--json and prints {"prefill_512": {"best": t/s, "median": t/s}, "decode_x8_at_0": ...}. The speed of a shared machine
varies: a round measures both programs, one right after the other, and the ratio is that of the medians (and of the best
values) over all rounds.
"""

import argparse, json, pathlib, shlex, statistics, subprocess

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument('models', nargs='+')
arguments.add_argument('--ours', default='target/release/pellucid')
arguments.add_argument('--theirs', required=True)
arguments.add_argument('--prompt', default='512,2048')
arguments.add_argument('--parallel', default='1,8,16')
arguments.add_argument('--depth', type=int, default=0)
arguments.add_argument('--generate', type=int, default=16)
arguments.add_argument('--repeat', type=int, default=1)
arguments.add_argument('--threads', type=int, default=2)
arguments.add_argument('--rounds', type=int, default=2)
options = arguments.parse_args()
common = ['--prompt', options.prompt, '--depth', str(options.depth), '--generate', str(options.generate)]
common += ['--repeat', str(options.repeat), '--threads', str(options.threads), '--json']


def run(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def theirs(model):
    """Returns {case: (best, median)} in tokens per second."""
    speeds = run([*shlex.split(options.theirs), model, '--parallel', options.parallel, *common])
    return {case: (speed['best'], speed['median']) for case, speed in speeds.items()}


def ours(model):
    """Returns {case: (best, median)}, {case: fraction of the read limit}, and the memory bandwidth in bytes/s."""
    report = run([options.ours, 'bench', model, '--device', 'cpu', '--batch', options.parallel, *common])
    speeds, fractions = {}, {}
    for row in report['speed']:
        prefill = row['what'] == 'prefill'
        case = f'prefill_{row["tokens"]}' if prefill else f'decode_x{row["sequences"]}_at_{row["depth"]}'
        speeds[case] = (row['best_tokens_per_second'], row['tokens_per_second'])
        fractions[case] = row['fraction_of_read_limit']
    return speeds, fractions, report['machine']['read_bytes_per_second']


for model in options.models:
    rounds = [(theirs(model), *ours(model)) for _ in range(options.rounds)]
    limits = ', '.join(f'{limit / 1e9:.1f}' for *_, limit in rounds)
    print(f'{pathlib.Path(model).name}: memory read at {limits} GB/s', flush=True)
    for case in rounds[0][1]:
        best, median = ([max(r[side][case][0] for r in rounds) for side in (0, 1)],
                        [statistics.median(r[side][case][1] for r in rounds) for side in (0, 1)])
        fractions = [r[2][case] for r in rounds if r[2][case]]
        limit = f'  {max(fractions):4.0%} of the read limit' if fractions else ''
        print(
            f'  {case:<20} llama.cpp {median[0]:8.1f} (best {best[0]:8.1f})'
            f'  pellucid {median[1]:8.1f} (best {best[1]:8.1f})'
            f'  ratio {median[1] / median[0]:5.2f} (best {best[1] / best[0]:5.2f}){limit}',
            flush=True,
        )
