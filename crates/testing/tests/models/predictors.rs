//! Layers that predict further tokens, against the reference implementation's, from both file formats.

use std::path::PathBuf;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_model::{BLOCK_LEN, KvMemory, LoadOptions, read_config, read_config_with};
use pellucid_selftest::goldens_folder;
use pellucid_selftest::suites::predictors::{PredictedSequence, predictions_equal_the_references};
use pellucid_tensor::{Backend, DType};
use pellucid_testing::{cpu, exact_isa};

const NAMES: [&str; 2] = ["glm4-moe", "qwen3-next"];
const WITH_PREDICTOR: LoadOptions = LoadOptions { context_len: None, predictor: true };

fn folder(name: &str) -> PathBuf {
    goldens_folder().with_file_name("predictors").join(name)
}

#[test]
fn predicted_logits_equal_the_references() {
    let backend: Arc<dyn Backend> = cpu(exact_isa(), 2).expect("an available instruction set");
    for folder in NAMES.map(folder) {
        for path in [&folder, &folder.join("model.gguf")] {
            predictions_equal_the_references(path, &folder, &backend);
        }
    }
}

/// With the predictor, the model's own logits have the same bits.
#[test]
fn a_predictor_changes_no_logit_of_the_model() {
    let backend: Arc<dyn Backend> = cpu(exact_isa(), 2).expect("an available instruction set");
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 90).collect();
    for name in NAMES {
        let mut sequence = PredictedSequence::load(&folder(name), &backend);
        let with = [sequence.run(&prompt[..30], 0, false), sequence.run(&prompt[30..], 30, false)].concat();
        let mut plain = pellucid_selftest::Runner::load(&folder(name), backend.clone(), None, 4);
        assert_eq!(plain.prompt(&prompt, &[40], vec![0, 1]), with.concat(), "{name}");
    }
}

#[test]
fn a_model_without_a_predictor_says_so() {
    for (name, tensor) in [("glm4-moe", "model.layers.3.eh_proj.weight"), ("qwen3-next", "mtp.fc.weight")] {
        let checkpoint = Checkpoint::open(&goldens_folder().join(name)).expect("a golden");
        let error = read_config_with(&checkpoint, WITH_PREDICTOR).unwrap_err().to_string();
        assert!(error.contains(tensor) && error.contains("--speculate mtp"), "{error}");
        let checkpoint = Checkpoint::open(&folder(name)).expect("a golden");
        let (with, without) =
            (read_config_with(&checkpoint, WITH_PREDICTOR).unwrap(), read_config(&checkpoint).unwrap());
        assert!(without.predictor.is_none() && with.num_layers() == without.num_layers());
        let bytes = |config| KvMemory::bytes_per_block(config, DType::F16, BLOCK_LEN).unwrap();
        // Keys and values of one more layer in F16, and rows in F32.
        let layer = 2 * 2 * with.key_heads(with.num_layers()).num_kv_heads * with.head_size;
        assert_eq!(bytes(&with) - bytes(&without), BLOCK_LEN * (layer + 4 * with.hidden_size), "{name}");
    }
}
