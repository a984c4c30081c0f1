//! Property tests: written files read back equal, and no bytes make the reader panic.

use pellucid_checkpoint::{Array, Checkpoint, Source, Value};
use pellucid_tensor::DType;
use proptest::collection::vec;
use proptest::num::{f32, f64};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::build::{Folder, Gguf, Tensor, gguf_types, open_as, open_gguf, safetensors, small_safetensors};

/// Checks what must hold for every checkpoint that opens.
fn check_invariants(checkpoint: &Checkpoint) {
    for info in checkpoint.tensors() {
        let view = checkpoint.tensor(&info.name).unwrap();
        assert_eq!(view.info.shape, info.shape);
        assert_eq!(Some(view.bytes().len()), info.dtype.bytes_for(info.num_elements()));
        assert!(info.shape.last().is_none_or(|row| row.is_multiple_of(info.dtype.block_len())));
        // Reads every byte: one outside the map would crash the test.
        std::hint::black_box(view.bytes().iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
    }
    let _ = (checkpoint.architecture(), checkpoint.chat_template());
    if let Source::Gguf(metadata) = checkpoint.source() {
        metadata.iter().for_each(|(key, value)| assert_eq!(metadata.get(key).is_some(), !value.type_name().is_empty()));
    }
}

/// An offset in a file, and 1, 4 or 8 bytes to write there.
fn mutation() -> impl Strategy<Value = (Index, Vec<u8>)> {
    let edges = select(vec![0, 1, 0x7f, 0xff, 1 << 31, u32::MAX as u64, 1 << 61, 1 << 63, u64::MAX - 7, u64::MAX]);
    let bytes = prop_oneof![
        any::<u8>().prop_map(|b| vec![b]),
        any::<u32>().prop_map(|n| n.to_le_bytes().to_vec()),
        edges.prop_map(|n| n.to_le_bytes().to_vec()),
    ];
    (any::<Index>(), bytes)
}

fn mutate(bytes: &mut [u8], mutations: &[(Index, Vec<u8>)]) {
    for (at, new) in mutations {
        let at = at.index(bytes.len());
        let len = new.len().min(bytes.len() - at);
        bytes[at..at + len].copy_from_slice(&new[..len]);
    }
}

fn scalar() -> impl Strategy<Value = Value> {
    let finite_f32 = f32::NORMAL | f32::ZERO | f32::SUBNORMAL;
    let finite_f64 = f64::NORMAL | f64::ZERO | f64::SUBNORMAL;
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        finite_f32.prop_map(Value::F32),
        finite_f64.prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    let flat = prop_oneof![
        vec(any::<u8>(), 0..6).prop_map(Array::U8),
        vec(any::<i8>(), 0..6).prop_map(Array::I8),
        vec(any::<u16>(), 0..6).prop_map(Array::U16),
        vec(any::<i16>(), 0..6).prop_map(Array::I16),
        vec(any::<u32>(), 0..6).prop_map(Array::U32),
        vec(any::<i32>(), 0..6).prop_map(Array::I32),
        vec(any::<u64>(), 0..6).prop_map(Array::U64),
        vec(any::<i64>(), 0..6).prop_map(Array::I64),
        vec(f32::NORMAL, 0..6).prop_map(Array::F32),
        vec(f64::NORMAL, 0..6).prop_map(Array::F64),
        vec(any::<bool>(), 0..6).prop_map(Array::Bool),
        vec(".{0,6}", 0..6).prop_map(|strings| Array::Strings(strings.into_iter().collect())),
    ];
    flat.prop_recursive(3, 16, 3, |inner| vec(inner, 0..4).prop_map(Array::Arrays))
}

/// Rows of one or two blocks, up to three further dimensions.
fn tensor() -> impl Strategy<Value = (DType, Vec<u64>)> {
    (select(gguf_types().collect::<Vec<_>>()), 1..3u64, vec(1..3u64, 0..4)).prop_map(|(dtype, blocks, outer)| {
        let row = blocks * dtype.block_len() as u64;
        (dtype, std::iter::once(row).chain(outer).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_written_gguf_reads_back_equal(
        version in 2..=3u32,
        alignment in select(vec![1u32, 16, 32, 256]),
        values in vec(prop_oneof![scalar(), array().prop_map(Value::Array)], 0..8),
        tensors in vec(tensor(), 0..4),
    ) {
        let mut file = Gguf { version, ..Gguf::empty() }.aligned(alignment);
        for (index, value) in values.iter().enumerate() {
            file = file.key(&format!("key.{index}"), value);
        }
        for (index, (dtype, dims)) in tensors.iter().enumerate() {
            file = file.tensor(Tensor::filled(&format!("tensor.{index}"), *dtype, dims));
        }
        let checkpoint = file.open().unwrap();
        check_invariants(&checkpoint);
        let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file") };
        prop_assert_eq!(metadata.len(), values.len() + 1);
        for (index, value) in values.iter().enumerate() {
            prop_assert_eq!(metadata.get(&format!("key.{index}")), Some(value));
        }
        prop_assert_eq!(checkpoint.tensors().len(), tensors.len());
        for (index, (dtype, dims)) in tensors.iter().enumerate() {
            let view = checkpoint.tensor(&format!("tensor.{index}")).unwrap();
            prop_assert_eq!(view.info.dtype, *dtype);
            prop_assert!(view.info.shape.iter().rev().map(|&dim| dim as u64).eq(dims.iter().copied()));
            prop_assert_eq!(&*view.bytes(), &*file.tensors[index].data);
        }
    }

    #[test]
    fn mutations_of_a_gguf_never_panic(
        mutations in vec(mutation(), 1..6),
        cut in any::<Index>(),
        whole in any::<bool>(),
    ) {
        let mut bytes = Gguf::small().bytes();
        mutate(&mut bytes, &mutations);
        let len = if whole { bytes.len() } else { cut.index(bytes.len()) };
        match open_gguf(&bytes[..len]) {
            Ok(checkpoint) => check_invariants(&checkpoint),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn random_bytes_never_panic(
        bytes in vec(any::<u8>(), 0..400),
        name in select(vec!["a.gguf", "a", "a.safetensors", "a.json"]),
    ) {
        prop_assert!(open_as(name, &bytes).is_err());
    }

    #[test]
    fn random_bytes_after_a_valid_start_never_panic(counts in (0..4u64, 0..4u64), bytes in vec(any::<u8>(), 0..400)) {
        let file = Gguf { num_tensors: Some(counts.0), num_keys: Some(counts.1), ..Gguf::empty() };
        if let Ok(checkpoint) = open_gguf(&[file.bytes(), bytes].concat()) {
            check_invariants(&checkpoint);
        }
    }

    #[test]
    fn a_written_safetensors_reads_back_equal(tensors in vec((0..3usize, vec(1..5usize, 0..4)), 0..6)) {
        let dtypes = [("F32", DType::F32), ("F16", DType::F16), ("BF16", DType::BF16)];
        let mut header = serde_json::Map::new();
        let mut data = Vec::new();
        for (index, (dtype, shape)) in tensors.iter().enumerate() {
            let start = data.len();
            let bytes = dtypes[*dtype].1.bytes_for(shape.iter().product()).unwrap();
            data.extend((0..bytes).map(|i| (i * 7 + index) as u8));
            let offsets = [start, data.len()];
            let description = serde_json::json!({"dtype": dtypes[*dtype].0, "shape": shape, "data_offsets": offsets});
            header.insert(format!("tensor.{index}"), description);
        }
        let folder = Folder::hugging_face();
        folder.put("model.safetensors", &safetensors(&serde_json::Value::Object(header).to_string(), &data));
        let checkpoint = folder.open().unwrap();
        check_invariants(&checkpoint);
        let mut start = 0;
        for (index, (dtype, shape)) in tensors.iter().enumerate() {
            let view = checkpoint.tensor(&format!("tensor.{index}")).unwrap();
            prop_assert_eq!((view.info.dtype, &view.info.shape), (dtypes[*dtype].1, shape));
            prop_assert_eq!(&*view.bytes(), &data[start..start + view.bytes().len()]);
            start += view.bytes().len();
        }
    }

    #[test]
    fn mutations_of_a_safetensors_never_panic(
        mutations in vec(mutation(), 1..6),
        digits in vec((any::<Index>(), b'0'..=b'9'), 0..4),
    ) {
        let mut bytes = small_safetensors();
        mutate(&mut bytes, &mutations);
        // Changing digits of the header changes offsets and shapes, and keeps it valid JSON.
        for (at, digit) in &digits {
            let places: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if !places.is_empty() {
                bytes[places[at.index(places.len())]] = *digit;
            }
        }
        let folder = Folder::hugging_face();
        folder.put("model.safetensors", &bytes);
        match folder.open() {
            Ok(checkpoint) => check_invariants(&checkpoint),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
