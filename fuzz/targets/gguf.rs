//! GGUF: header, metadata and the place of each tensor. An accepted file has its tensors within itself, is read again
//! as the same after it was written, and gives a tokenizer that works or an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_checkpoint::{Checkpoint, GgufWriter, NewTensor, Source};
use pellucid_fuzz::{check_checkpoint, check_tokenizer, file};
use pellucid_tokenizer::Tokenizer;

fuzz_target!(|data: &[u8]| {
    let Ok(checkpoint) = Checkpoint::open(&file("model.gguf", data)) else { return };
    check_checkpoint(&checkpoint, data.len());
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file was opened as something else") };
    if let Ok(tokenizer) = Tokenizer::from_checkpoint(&checkpoint) {
        check_tokenizer(&tokenizer, "Hello, world! 12 é\n");
    }

    let described = checkpoint.tensors().iter();
    let tensors: Vec<NewTensor> = described
        .map(|info| NewTensor { name: info.name.clone(), dtype: info.dtype, shape: info.shape.clone() })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), metadata, &tensors).expect("a vector");
    for tensor in &tensors {
        let view = checkpoint.tensor(&tensor.name).expect("a listed tensor");
        writer.write_tensor(&view.bytes()).expect("a vector");
    }
    let written = writer.finish().expect("a vector");
    let again = Checkpoint::open(&file("again.gguf", &written)).expect("a file that we wrote");
    let Source::Gguf(reread) = again.source() else { panic!("a GGUF file was opened as something else") };
    // As text, because a number may be NaN.
    assert_eq!(
        format!("{:?}", metadata.iter().collect::<Vec<_>>()),
        format!("{:?}", reread.iter().collect::<Vec<_>>())
    );
    for (tensor, found) in tensors.iter().zip(again.tensors()) {
        assert_eq!((&tensor.name, tensor.dtype, &tensor.shape), (&found.name, found.dtype, &found.shape));
        let bytes =
            |checkpoint: &Checkpoint| checkpoint.tensor(&tensor.name).expect("a listed tensor").bytes().to_vec();
        assert_eq!(bytes(&checkpoint), bytes(&again), "{}", tensor.name);
    }
});
