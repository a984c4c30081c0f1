//! A Hugging Face folder: `config.json`, a zero byte, `model.safetensors`. Accepted tensors lie within the file; the
//! configuration and the loader accept or refuse them without a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_checkpoint::Checkpoint;
use pellucid_fuzz::{check_checkpoint, file, folder, two_parts};

fuzz_target!(|data: &[u8]| {
    let (config, weights) = two_parts(data);
    file("config.json", config);
    file("model.safetensors", weights);
    let Ok(checkpoint) = Checkpoint::open(folder()) else { return };
    check_checkpoint(&checkpoint, weights.len());
});
