//! GGUF files that open.

use pellucid_checkpoint::{Array, Checkpoint, Error, GgufWriter, NewTensor, Source, Value};
use pellucid_tensor::DType;

use crate::build::{Folder, Gguf, Tensor, gguf_types, kind_of};

fn metadata(checkpoint: &Checkpoint) -> &pellucid_checkpoint::Metadata {
    match checkpoint.source() {
        Source::Gguf(metadata) => metadata,
        Source::HuggingFace(_) => panic!("a GGUF file is not a folder"),
    }
}

#[test]
fn versions_2_and_3_open_alike() {
    for version in [2, 3] {
        let file = Gguf { version, ..Gguf::small() };
        let checkpoint = file.open().unwrap();
        assert_eq!(checkpoint.architecture().unwrap(), "llama");
        assert_eq!(checkpoint.file_bytes(), file.bytes().len() as u64);
        assert_eq!(checkpoint.files().len(), 1);
        assert_eq!(checkpoint.chat_template(), None);

        // The file has the contiguous dimension first, `TensorInfo` has it last.
        let tensor = checkpoint.tensor("token_embd.weight").unwrap();
        assert_eq!((tensor.info.dtype, tensor.info.shape.as_slice()), (DType::Q4_0, [3, 32].as_slice()));
        assert_eq!(*tensor.bytes(), *file.tensors[0].data);
        assert_eq!((tensor.info.num_elements(), tensor.info.num_bytes()), (96, 54));
        let tensor = checkpoint.tensor("output_norm.weight").unwrap();
        assert_eq!((tensor.info.dtype, tensor.info.shape.as_slice()), (DType::F32, [5].as_slice()));
        assert_eq!(*tensor.bytes(), *file.tensors[1].data);
    }
}

/// Writes a checkpoint as a GGUF file.
fn rewritten(checkpoint: &Checkpoint) -> Vec<u8> {
    let describe = |info: &pellucid_checkpoint::TensorInfo| NewTensor {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    };
    let tensors: Vec<NewTensor> = checkpoint.tensors().iter().map(describe).collect();
    let mut writer = GgufWriter::new(Vec::new(), metadata(checkpoint), &tensors).unwrap();
    for tensor in &tensors {
        writer.write_tensor(&checkpoint.tensor(&tensor.name).unwrap().bytes()).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn a_file_that_is_read_and_written_keeps_every_byte() {
    let array = |array: Array| Value::Array(array);
    let every_value = Gguf::small()
        .key("u8", &Value::U8(1))
        .key("i8", &Value::I8(-2))
        .key("u16", &Value::U16(3))
        .key("i16", &Value::I16(-4))
        .key("i32", &Value::I32(-5))
        .key("f32", &Value::F32(0.5))
        .key("bool", &Value::Bool(true))
        .key("u64", &Value::U64(u64::MAX))
        .key("i64", &Value::I64(i64::MIN))
        .key("f64", &Value::F64(-0.25))
        .key("bools", &array(Array::Bool(vec![true, false])))
        .key("bytes", &array(Array::U8(vec![7, 8, 9])))
        .key("wide", &array(Array::I64(vec![-1, 1])))
        .key("nested", &array(Array::Arrays(vec![Array::U32(vec![1]), Array::F64(vec![])])));
    let mut every_type = Gguf::small();
    for dtype in gguf_types() {
        every_type = every_type.tensor(Tensor::filled(dtype.name(), dtype, &[256, 2]));
    }
    for file in [Gguf::small(), every_value, every_type, Gguf::small().aligned(128)] {
        let (bytes, written) = (file.bytes(), rewritten(&file.open().unwrap()));
        // The last tensor is padded too, as by other writers; a reader does not need that.
        assert_eq!(written[..bytes.len()], bytes);
        assert!(written[bytes.len()..].iter().all(|&byte| byte == 0) && written.len() < bytes.len() + 128);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let checkpoint = Gguf::small().open().unwrap();
    assert!(checkpoint.find_tensor("blk.0.attn_q.weight").is_none());
    let error = checkpoint.tensor("blk.0.attn_q.weight").unwrap_err();
    assert_eq!(error.to_string(), r#"the model has no tensor "blk.0.attn_q.weight""#);
}

#[test]
fn every_supported_type_opens_by_its_number() {
    let mut file = Gguf::small();
    for dtype in gguf_types() {
        file = file.tensor(Tensor::filled(dtype.name(), dtype, &[256, 2]));
    }
    let checkpoint = file.open().unwrap();
    for dtype in gguf_types() {
        let tensor = checkpoint.tensor(dtype.name()).unwrap();
        assert_eq!(tensor.info.dtype, dtype);
        assert_eq!(tensor.bytes().len(), 512 / dtype.block_len() * dtype.block_bytes());
    }
}

#[test]
fn a_vocabulary_without_weights_opens() {
    let checkpoint = Gguf { tensors: Vec::new(), ..Gguf::small() }.open().unwrap();
    assert!(checkpoint.tensors().is_empty());
    let tokens: Vec<&str> = metadata(&checkpoint).strings("tokenizer.ggml.tokens").unwrap().iter().collect();
    assert_eq!(tokens, ["<s>", "a", ""]);
}

#[test]
fn the_alignment_key_moves_the_data() {
    for alignment in [1, 8, 64, 4096] {
        let file = Gguf { tensors: Gguf::small().tensors, ..Gguf::empty() }.aligned(alignment);
        let checkpoint = file.open().unwrap();
        for tensor in &file.tensors {
            let name = std::str::from_utf8(&tensor.name).unwrap();
            assert_eq!(*checkpoint.tensor(name).unwrap().bytes(), *tensor.data, "{name} at alignment {alignment}");
        }
    }
}

#[test]
fn tensors_are_listed_in_the_order_of_their_data() {
    let mut file = Gguf::small();
    // 54 bytes of Q4_0 and padding to 64, then 20 bytes of F32. The header describes them in reverse order.
    file.tensors[0].offset = Some(0);
    file.tensors[1].offset = Some(64);
    let data: Vec<u8> = file.bytes();
    let mut swapped = file.clone();
    swapped.tensors.swap(0, 1);
    let mut bytes = swapped.bytes();
    let data_start = bytes.len() - (32 + 54);
    bytes.truncate(data_start);
    bytes.extend(&data[data.len() - (64 + 20)..]);
    let checkpoint = crate::build::open_gguf(&bytes).unwrap();
    let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["token_embd.weight", "output_norm.weight"]);
    assert_eq!(*checkpoint.tensor("output_norm.weight").unwrap().bytes(), *file.tensors[1].data);
}

#[test]
fn a_scalar_has_no_dimensions_and_one_value() {
    let checkpoint = Gguf::small().tensor(Tensor::filled("scalar", DType::F32, &[])).open().unwrap();
    let tensor = checkpoint.tensor("scalar").unwrap();
    assert_eq!((tensor.info.shape.len(), tensor.info.num_elements(), tensor.bytes().len()), (0, 1, 4));
}

#[test]
fn getters_convert_between_integers_and_refuse_what_does_not_fit() {
    let checkpoint = Gguf::empty()
        .key("u8", &Value::U8(7))
        .key("i64", &Value::I64(7))
        .key("negative", &Value::I32(-1))
        .key("huge", &Value::U64(u64::MAX))
        .key("f64", &Value::F64(0.5))
        .key("bool", &Value::Bool(true))
        .key("bools", &Value::Array(Array::Bool(vec![true, false])))
        .key("u16s", &Value::Array(Array::U16(vec![1, 65_535])))
        .key("i64s", &Value::Array(Array::I64(vec![1, -1])))
        .key("f64s", &Value::Array(Array::F64(vec![0.25])))
        .open()
        .unwrap();
    let metadata = metadata(&checkpoint);
    assert_eq!((metadata.u32("u8").unwrap(), metadata.u64("i64").unwrap()), (7, 7));
    assert_eq!(metadata.u64("huge").unwrap(), u64::MAX);
    assert_eq!((metadata.f32("f64").unwrap(), metadata.bool("bool").unwrap()), (0.5, true));
    assert_eq!(metadata.bools("bools").unwrap(), [true, false]);
    assert_eq!(metadata.u32s("u16s").unwrap(), [1, 65_535]);
    assert_eq!(metadata.i32s("i64s").unwrap(), [1, -1]);
    assert_eq!(metadata.f32s("f64s").unwrap(), [0.25]);
    assert_eq!((metadata.opt_u32("absent").unwrap(), metadata.opt_str("absent").unwrap()), (None, None));
    assert_eq!(metadata.iter().count(), metadata.len());

    let message = |error: Error| error.to_string();
    assert_eq!(message(metadata.u32("absent").unwrap_err()), r#"the model has no key "absent""#);
    let cases = [
        (metadata.u32("negative").err(), r#"key "negative": expected an integer from 0 to 2^32 - 1, found -1"#),
        (
            metadata.u32("huge").err(),
            r#"key "huge": expected an integer from 0 to 2^32 - 1, found 18446744073709551615"#,
        ),
        (metadata.opt_u32("f64").err(), r#"key "f64": expected an integer from 0 to 2^32 - 1, found an f64"#),
        (metadata.opt_f32("u8").err(), r#"key "u8": expected a float, found a u8"#),
        (metadata.opt_str("u16s").err(), r#"key "u16s": expected a string, found an array of u16"#),
        (metadata.opt_strings("bool").err(), r#"key "bool": expected an array of strings, found a bool"#),
        (
            metadata.u32s("i64s").err(),
            r#"key "i64s": expected an array of integers from 0 to 2^32 - 1, found -1 as entry 1"#,
        ),
    ];
    for (error, expected) in cases {
        assert_eq!(message(error.unwrap()), expected);
    }
}

#[test]
fn the_chat_template_is_a_string_or_an_error() {
    let checkpoint = Gguf::empty().key("tokenizer.chat_template", &Value::String("{{ x }}".into())).open().unwrap();
    assert_eq!(checkpoint.chat_template(), Some("{{ x }}"));
    let error = Gguf::empty().key("tokenizer.chat_template", &Value::U8(1)).error();
    assert_eq!(error, r#"key "tokenizer.chat_template": expected a string, found a u8"#);
}

/// The parts of a split model. The second and third contain one tensor each.
pub(crate) fn split_parts() -> Vec<Gguf> {
    (0..3u16)
        .map(|number| {
            let mut part = Gguf::empty();
            if number == 0 {
                part = part.key("general.architecture", &Value::String("llama".into()));
            } else {
                part = part.tensor(Tensor::filled(&format!("tensor.{number}"), DType::F16, &[4, u64::from(number)]));
            }
            part.key("split.no", &Value::U16(number))
                .key("split.count", &Value::U16(3))
                .key("split.tensors.count", &Value::I32(2))
        })
        .collect()
}

pub(crate) fn split_name(number: usize) -> String {
    format!("model-{:05}-of-00003.gguf", number + 1)
}

pub(crate) fn put_split(parts: &[Gguf]) -> Folder {
    let folder = Folder::empty();
    for (number, part) in parts.iter().enumerate() {
        folder.put(&split_name(number), &part.bytes());
    }
    folder
}

#[test]
fn any_part_opens_all() {
    let parts = split_parts();
    let folder = put_split(&parts);
    for number in 0..3 {
        let checkpoint = Checkpoint::open(&folder.path().join(split_name(number))).unwrap();
        assert_eq!(checkpoint.architecture().unwrap(), "llama", "metadata of the first part, by way of part {number}");
        assert_eq!(checkpoint.files().len(), 3);
        assert_eq!(checkpoint.file_bytes(), parts.iter().map(|p| p.bytes().len() as u64).sum::<u64>());
        let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["tensor.1", "tensor.2"]);
        assert_eq!(*checkpoint.tensor("tensor.2").unwrap().bytes(), *parts[2].tensors[0].data);
    }
}

#[test]
fn a_split_of_one_is_a_whole_file() {
    for count in [0, 1] {
        let file = Gguf::small().key("split.no", &Value::U16(0)).key("split.count", &Value::U16(count));
        assert_eq!(file.open().unwrap().tensors().len(), 2);
    }
}

#[test]
fn a_gguf_file_is_recognised_by_its_magic_whatever_its_name() {
    let checkpoint = crate::build::open_as("sha256-0123", &Gguf::small().bytes()).unwrap();
    assert_eq!(checkpoint.tensors().len(), 2);
}

#[test]
fn unsupported_types_are_named_with_their_tensor() {
    let supported: Vec<u32> = gguf_types().map(kind_of).collect();
    for kind in (0..64).chain([u32::MAX]) {
        let mut file = Gguf::small();
        file.tensors[1].kind = kind;
        // A shape of whole blocks in every format, and enough data for the largest.
        file.tensors[1].dims = vec![256];
        file.tensors[1].data = vec![0; 1024];
        if supported.contains(&kind) {
            assert!(file.open().is_ok(), "type {kind}");
            continue;
        }
        let message = file.error();
        let (tensor, number) = (r#"tensor "output_norm.weight" has the unsupported type"#, format!("(number {kind})"));
        assert!(message.contains(tensor) && message.contains(&number), "{message}");
        assert!(gguf_types().all(|dtype| message.contains(dtype.name())), "lists the supported ones: {message}");
    }
}
