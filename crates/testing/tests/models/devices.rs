//! A model whose parts are on several devices: equal devices give the bits of one, whatever each of them has.

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_model::{BLOCK_LEN, Decoder, Error, KvMemory, LoadOptions, Model, Placement, read_config};
use pellucid_selftest::{Runner, goldens_folder};
use pellucid_tensor::{Backend, DType};
use pellucid_testing::{cpu, invariance_cases};

const NUM_BLOCKS: usize = 2;

fn device(isa: Isa) -> Arc<dyn Backend> {
    cpu(isa, 1).expect("an available instruction set")
}

fn runner(checkpoint: &Checkpoint, isas: [Isa; 2], placement: Placement, kv_dtype: DType) -> Result<Runner, Error> {
    let options = LoadOptions::default();
    let model = Decoder::load_on(checkpoint, isas.map(device).into(), placement, options, &mut |_, _| ())?;
    let kv = KvMemory::new(model.config(), model.devices(), kv_dtype, NUM_BLOCKS, BLOCK_LEN)?;
    let kv = kv.with_states(model.config(), model.devices(), NUM_BLOCKS)?;
    Ok(Runner::with_kv(model, kv))
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Placements of a model with `num_layers` on two devices, with names.
fn placements(num_layers: usize) -> Vec<(&'static str, Placement)> {
    let half = num_layers / 2;
    let on_one = || vec![0; num_layers];
    let alternating: Vec<usize> = (0..num_layers).map(|layer| layer % 2).collect();
    vec![
        ("half of the layers", Placement::of_layers(&[num_layers - half, half])),
        ("the output alone", Placement { mixers: on_one(), mlps: on_one(), output: 1 }),
        ("MLPs", Placement { mixers: on_one(), mlps: vec![1; num_layers], output: 0 }),
        ("mixers", Placement { mixers: vec![1; num_layers], mlps: on_one(), output: 1 }),
        ("every second layer", Placement { mixers: alternating.clone(), mlps: alternating, output: 0 }),
    ]
}

#[test]
fn every_placement_gives_the_bits_of_one_device() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut num_compared, mut refused) = (0, Vec::new());
    for case in invariance_cases(folder.path()) {
        let checkpoint = Checkpoint::open(&case.path).expect("a model").with_reference_rounding();
        let num_layers = read_config(&checkpoint).expect("a supported model").num_layers();
        let prompt_bits = |placement: Placement| {
            let runner = runner(&checkpoint, [Isa::best(); 2], placement, case.kv_dtype);
            runner.map(|mut runner| bits(&runner.prompt(&case.prompt, &[17, 1, 1, 30], vec![1, 0])))
        };
        let one = prompt_bits(Placement::of_layers(&[num_layers, 0])).expect("one device computes every model");
        for (what, placement) in placements(num_layers) {
            match prompt_bits(placement) {
                Ok(several) => assert!(one == several, "{}: {what} on another device", case.name),
                Err(error @ Error::SharedAcrossDevices { .. }) => refused.push(format!("{}: {error}", case.name)),
                Err(error) => panic!("{}: {what} on another device: {error}", case.name),
            }
            num_compared += 1;
        }
    }
    println!("{}", refused.join("\n"));
    assert!(num_compared > 200 && refused.len() < 20, "{num_compared} placements, of which were refused: {refused:?}");
    assert!(refused.iter().all(|reason| reason.starts_with("gemma")), "{refused:?}");
}

#[test]
fn devices_of_two_kinds_have_bits_of_their_own_that_chunks_do_not_change() {
    if Isa::best() == Isa::Scalar {
        return;
    }
    for name in ["llama3", "qwen3-moe", "qwen35", "gemma2"] {
        let checkpoint = Checkpoint::open(&goldens_folder().join(name)).expect("a model");
        let num_layers = read_config(&checkpoint).expect("a supported model").num_layers();
        let prompt: Vec<u32> = (0..50).map(|i| (i * i * 7 + i * 3) % 60).collect();
        let of = |isas, placement, chunks: &[usize]| {
            let runner = runner(&checkpoint, isas, placement, DType::F16);
            bits(&runner.expect("a possible placement").prompt(&prompt, chunks, vec![1, 0]))
        };
        let split = Placement { mixers: vec![0; num_layers], mlps: vec![1; num_layers], output: 0 };
        let mix = [Isa::best(), Isa::Scalar];
        let whole = of(mix, split.clone(), &[50]);
        for chunks in [&[1][..], &[7], &[33, 1, 1]] {
            assert!(whole == of(mix, split.clone(), chunks), "{name} in chunks of {chunks:?}");
        }
        let best = of([Isa::best(); 2], split.clone(), &[50]);
        // Sums of eight lanes have one order, those of sixteen another.
        if matches!(Isa::best(), Isa::Avx512 | Isa::Amx) {
            assert!(whole != best, "{name}: the second device computes its part with its own arithmetic");
        }
    }
}
