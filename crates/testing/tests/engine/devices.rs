//! A model on several devices behind the engine: replies have the bits of one device, with a cold and a warm cache,
//! preemption and forks.

use std::path::Path;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{Engine, EngineOptions, Overcommit, Request};
use pellucid_model::{Decoder, LoadOptions, Placement, read_config};
use pellucid_selftest::goldens_folder;
use pellucid_tensor::{Backend, DType};
use pellucid_testing::cpu;

use crate::support::{OPTIONS, bits, engine, prompts, request, serve};

fn engine_on_devices(path: &Path, with_experts: bool, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(path).expect("a model");
    let config = read_config(&checkpoint).expect("a supported model");
    let num_layers = config.num_layers();
    let placement = match with_experts {
        true => Placement::of_layers(&[num_layers, 0]).with_experts_on(1, 1, &config),
        false => Placement::of_layers(&[num_layers - 1, 1]),
    };
    let device = || cpu(Isa::best(), 1).expect("the best instruction set is available") as Arc<dyn Backend>;
    let (devices, options_of_load) = (vec![device(), device()], LoadOptions::default());
    let model = Decoder::load_on(&checkpoint, devices, placement, options_of_load, &mut |_, _| ());
    let model = model.expect("a possible placement");
    assert!(model.devices().are_several());
    let output = model.backend().clone();
    Engine::new(Box::new(model), output, options).expect("an engine")
}

#[test]
fn replies_have_the_bits_of_one_device_cached_preempted_and_forked() {
    for (name, with_experts) in [("llama3", false), ("qwen3-moe", true), ("qwen35", false)] {
        let path = goldens_folder().join(name);
        // Some requests have several choices: their sequences fork, and blocks are copied when one of them writes.
        let requests: Vec<Request> = (prompts(16, 90).into_iter().enumerate())
            .map(|(i, prompt)| {
                let width = if i % 4 == 0 { 3 } else { 1 };
                Request { num_choices: width, best_of: width, ..request(prompt, i as u64 % 4) }
            })
            .collect();
        // A snapshot at every block: a large state has fewer slots by default than this cache has blocks.
        let base = EngineOptions { snapshot_distance: (name == "qwen35").then_some(1), ..OPTIONS };
        let mut single = engine(&path, 1, EngineOptions { chunk_len: 64, ..base });
        let alone: Vec<_> =
            requests.iter().map(|request| bits(&serve(&mut single, std::slice::from_ref(request))[0])).collect();
        let settings = [
            EngineOptions { kv_dtype: DType::F32, ..base },
            // Little memory and overcommit: requests are preempted and computed again.
            EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, max_sequences: 8, ..base },
        ];
        for (i, options) in settings.into_iter().enumerate() {
            let mut engine = engine_on_devices(&path, with_experts, options);
            for warmth in ["cold", "warm"] {
                for (j, outcome) in serve(&mut engine, &requests).iter().enumerate() {
                    let case = format!("{name} on two devices: request {j}, setting {i}, {warmth}");
                    assert!(bits(outcome) == alone[j], "{case} differs");
                }
            }
            let stats = engine.stats();
            assert!(stats.cached_tokens > 0, "{name}: the second round uses the prefix cache");
            assert!(i != 1 || stats.preemptions > 0, "{name}: little memory causes preemptions");
        }
    }
}
