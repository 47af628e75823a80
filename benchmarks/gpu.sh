#!/usr/bin/env bash
# Everything that needs a GPU, in pieces of less than ten minutes each: benchmarks/gpu.sh [PIECE...]
#
#   tests    the contract tests and other tests that create tensors, on "cuda"
#   steps    a training step on CPU and GPU: eight schools, networks of 16 to 1,024 particles; all methods
#   fits     `fit` on five models of the zoo, on CPU and GPU
#   resnet   steps of a WideResNet-16-4 on CIFAR-10 (needs DATA, a folder with cifar10/)
#   kivi     kernels of KIVI's ratio; vectorised particles compared with a loop
#   vae      the autoencoder of examples/vae.py, all of MNIST (needs DATA, a folder with mnist/)
#   lenet    MNIST by LeNet: MAP, mean field, LIVI (needs DATA)
#
# Results go to benchmarks/results, those of the examples to OUT (default: gpu_results).
set -euo pipefail
cd "$(dirname "$0")/.."
OUT="${OUT:-gpu_results}"
mkdir -p "$OUT"
export PYTHONPATH="$PWD"

piece_tests() { python -m pytest -q -n 8 tests/test_device.py; }
piece_steps() {
    python -m benchmarks.speed.steps --large
    python -m benchmarks.speed.steps --large --device cuda
    python -m benchmarks.speed.steps --methods --device cuda
}
piece_fits() {
    for device in cuda cpu; do
        python -m benchmarks.zoo.run --device $device --out "$OUT/fits_$device.jsonl" \
            --models logistic_breast_cancer gp_bernoulli horseshoe_300 network_500 irt_2pl
    done
}
piece_resnet() {
    python -m benchmarks.networks.wide_resnet --data-dir "$DATA" --device cuda --width 4 --steps 60
}
piece_kivi() {
    python -m benchmarks.kivi_speed --device cuda
    python -m benchmarks.vectorization_speed --device cuda
}
piece_vae() { python examples/vae.py --device cuda --data-dir "$DATA/mnist" --epochs 20 --out "$OUT"; }
piece_lenet() {
    python -m benchmarks.networks.lenet --data-dir "$DATA" --device cuda --seeds 1 --epochs 10
}

python -c "import torch; print(torch.cuda.get_device_name())"
for piece in "${@:-tests steps fits resnet kivi vae lenet}"; do
    for name in $piece; do
        echo "== $name"
        "piece_$name" 2>&1 | tee "$OUT/$name.log"
    done
done
