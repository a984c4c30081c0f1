//! GGUF files with one error each. There is a case for every kind of error that has broken readers of this format.

use pellucid_checkpoint::{Array, Checkpoint, Value};
use pellucid_tensor::DType;

use crate::build::{
    Folder, Gguf, Tensor, gguf_error, gguf_types, open_as, open_gguf, put_string, put_value, quick_error,
};
use crate::gguf::{put_split, split_name, split_parts};

/// Counts and lengths that overflow a sign, a product with an element size, or a sum with a position.
const HUGE: [u64; 7] = [1 << 32, (1 << 40) + 1, 1 << 61, 1 << 62, 1 << 63, u64::MAX - 7, u64::MAX];

#[test]
fn the_file_that_the_cases_change_opens() {
    assert!(Gguf::small().open().is_ok());
}

#[test]
fn cut_after_every_byte() {
    let bytes = Gguf::small().bytes();
    for len in 0..bytes.len() {
        gguf_error(&bytes[..len]);
    }
    assert!(open_gguf(&bytes).is_ok());
}

#[test]
fn a_cut_says_where_and_what() {
    let bytes = Gguf::small().bytes();
    let message = gguf_error(&bytes[..10]);
    assert!(
        message.contains("the file ends within the number of tensors: expected 8 bytes from byte 8, found 2"),
        "{message}"
    );
    let message = gguf_error(&bytes[..bytes.len() - 1]);
    assert!(message.contains(r#"tensor "output_norm.weight" lies at bytes 64 to 84 of the data"#), "{message}");
    assert!(message.contains("within the 83 bytes of data that the file has"), "{message}");
}

#[test]
fn wrong_magic() {
    for magic in [*b"GGML", *b"FUGG", *b"ggjt", [0; 4], [0xff; 4]] {
        let message = Gguf { magic, ..Gguf::small() }.error();
        assert!(message.contains(r#"expected the four bytes "GGUF""#), "{message}");
    }
    let error = open_as("model.bin", b"ggjt\x01\x00\x00\x00").unwrap_err().to_string();
    assert!(error.contains(r#"not a model"#) && error.contains(r#"starts with "ggjt""#), "{error}");
}

#[test]
fn wrong_version() {
    for version in [0, 1, 4, 255, 1 << 31, u32::MAX] {
        let message = Gguf { version, ..Gguf::small() }.error();
        assert!(message.contains(&format!("GGUF version: expected 2 or 3, found {version}")), "{message}");
    }
}

#[test]
fn big_endian() {
    for version in [1, 2, 3] {
        let message = Gguf { version: u32::swap_bytes(version), ..Gguf::small() }.error();
        assert!(message.contains(&format!("GGUF version {version} in big-endian byte order")), "{message}");
    }
}

#[test]
fn huge_numbers_of_tensors_and_keys() {
    for huge in HUGE {
        let message = Gguf { num_tensors: Some(huge), ..Gguf::small() }.error();
        assert!(message.contains("the number of tensors") && message.contains(&huge.to_string()), "{message}");
        let message = Gguf { num_keys: Some(huge), ..Gguf::small() }.error();
        assert!(message.contains("the number of keys") && message.contains(&huge.to_string()), "{message}");
    }
}

/// These counts are within the reader's limits, and are refused because of the length of the file.
#[test]
fn counts_within_the_limits_and_beyond_the_file() {
    let message = Gguf { num_tensors: Some(1 << 20), ..Gguf::small() }.error();
    assert!(message.contains("the file ends within the number of tensors (a count of 1048576)"), "{message}");
    let message = Gguf { num_keys: Some(1 << 16), ..Gguf::small() }.error();
    assert!(message.contains("the file ends within the number of keys (a count of 65536)"), "{message}");
    for element in 0..=12u32 {
        let message = with_value(9, &[&element.to_le_bytes(), &(1u64 << 24).to_le_bytes()]).error();
        let expected = r#"the file ends within the array of key "bad.key" (a count of 16777216)"#;
        assert!(message.contains(expected), "{message}");
    }
}

/// The (sparse) file is long enough for these counts, and they are refused because of the reader's limits.
#[test]
fn counts_within_the_file_and_beyond_the_limits() {
    let cases = [
        (Gguf { num_tensors: Some((1 << 20) + 1), ..Gguf::empty() }, "the number of tensors: expected at most 1048576"),
        (Gguf { num_keys: Some((1 << 16) + 1), ..Gguf::empty() }, "the number of keys: expected at most 65536"),
        (
            with_value(9, &[&0u32.to_le_bytes(), &((1u64 << 24) + 1).to_le_bytes()]),
            r#"the array of key "bad.key": expected at most 16777216"#,
        ),
        (
            with_value(8, &[&((64u64 << 20) + 1).to_le_bytes()]),
            r#"the length of key "bad.key": expected at most 67108864"#,
        ),
    ];
    for (mut file, expected) in cases {
        file.tensors.clear();
        let folder = Folder::empty();
        let path = folder.put("model.gguf", &file.bytes());
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 28).unwrap();
        let message = quick_error(&path);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn counts_that_are_off_by_one() {
    Gguf { num_tensors: Some(3), ..Gguf::small() }.error();
    Gguf { num_keys: Some(5), ..Gguf::small() }.error();
    // With one less, the bytes that follow are read as something else.
    Gguf { num_keys: Some(3), ..Gguf::small() }.error();
}

/// A file with a key whose value is this type number and these bytes.
fn with_value(kind: u32, rest: &[&[u8]]) -> Gguf {
    let mut value = kind.to_le_bytes().to_vec();
    rest.iter().for_each(|bytes| value.extend(*bytes));
    Gguf::small().raw_key(b"bad.key", value)
}

#[test]
fn huge_lengths_of_strings() {
    for huge in HUGE {
        let message = with_value(8, &[&huge.to_le_bytes(), b"text"]).error();
        assert!(message.contains(r#"key "bad.key""#), "{message}");

        // The name of a key, and that of a tensor.
        let mut bytes = Gguf::small().bytes();
        bytes[24..32].copy_from_slice(&huge.to_le_bytes());
        assert!(gguf_error(&bytes).contains("the name of key 0"));
        let mut file = Gguf::small();
        file.tensors.truncate(1);
        let mut bytes = file.bytes();
        let at = bytes.windows(11).position(|w| w == b"token_embd.").unwrap() - 8;
        bytes[at..at + 8].copy_from_slice(&huge.to_le_bytes());
        assert!(gguf_error(&bytes).contains("the name of tensor 0"));
    }
}

#[test]
fn huge_lengths_of_arrays() {
    for huge in HUGE {
        for element in 0..=12u32 {
            let message = with_value(9, &[&element.to_le_bytes(), &huge.to_le_bytes(), &[0; 64]]).error();
            assert!(message.contains(r#"key "bad.key""#) && message.contains(&huge.to_string()), "{message}");
        }
        // A string of an array, and an array within an array.
        let one = 1u64.to_le_bytes();
        let message = with_value(9, &[&8u32.to_le_bytes(), &one, &huge.to_le_bytes()]).error();
        assert!(message.contains(r#"entry 0 of key "bad.key""#), "{message}");
        with_value(9, &[&9u32.to_le_bytes(), &one, &4u32.to_le_bytes(), &huge.to_le_bytes()]).error();
    }
}

#[test]
fn lengths_beyond_the_limits_of_the_reader() {
    let long_name = vec![b'n'; 65_536];
    let message = Gguf::small().raw_key(&long_name, vec![0, 0, 0, 0, 0]).error();
    assert!(message.contains("the length of the name of key 4: expected at most 65535, found 65536"), "{message}");
    let mut file = Gguf::small();
    file.tensors[0].name = vec![b'n'; 1025];
    let message = file.error();
    assert!(message.contains("the length of the name of tensor 0: expected at most 1024, found 1025"), "{message}");
}

#[test]
fn unknown_types_of_values() {
    for kind in [13, 255, u32::MAX] {
        let message = with_value(kind, &[&[0; 64]]).error();
        assert!(message.contains(r#"the type of key "bad.key""#) && message.contains(&kind.to_string()), "{message}");
        let message = with_value(9, &[&kind.to_le_bytes(), &[0; 64]]).error();
        assert!(message.contains(r#"the type of key "bad.key""#), "{message}");
    }
}

#[test]
fn a_bool_that_is_neither() {
    assert!(with_value(7, &[&[2]]).error().contains("expected a bool of 0 or 1, found 2"));
    assert!(with_value(9, &[&7u32.to_le_bytes(), &2u64.to_le_bytes(), &[1, 255]]).error().contains("found 255"));
}

#[test]
fn text_that_is_not_utf8() {
    let mut value = 8u32.to_le_bytes().to_vec();
    put_string(&mut value, b"ok \xff\xfe");
    assert!(Gguf::small().raw_key(b"bad.key", value).error().contains(r#"key "bad.key": expected UTF-8 text"#));
    let message = with_value(9, &[&8u32.to_le_bytes(), &1u64.to_le_bytes(), &1u64.to_le_bytes(), b"\x80"]).error();
    assert!(message.contains(r#"entry 0 of key "bad.key": expected UTF-8"#), "{message}");
    assert!(Gguf::small().raw_key(b"\xc3\x28", vec![0, 0, 0, 0, 0]).error().contains("the name of key 4"));
    let mut file = Gguf::small();
    file.tensors[1].name = b"\xff".to_vec();
    assert!(file.error().contains("the name of tensor 1"));
}

#[test]
fn deeply_nested_arrays() {
    let nested = |depth: usize| {
        let mut array = Array::U8(vec![1]);
        for _ in 1..depth {
            array = Array::Arrays(vec![array]);
        }
        Gguf::small().key("bad.key", &Value::Array(array))
    };
    assert!(nested(4).open().is_ok());
    for depth in [5, 6, 1000] {
        let message = nested(depth).error();
        assert!(message.contains(r#"the nesting of arrays in key "bad.key""#), "{message}");
    }
}

#[test]
fn zero_for_every_divisor_and_size() {
    let mut value = Vec::new();
    put_value(&mut value, &Value::U32(0));
    let message = Gguf::small().raw_key(b"general.alignment", value).error();
    assert!(message.contains(r#"key "general.alignment": expected a power of two up to 2^20, found 0"#), "{message}");
    for dims in [vec![0], vec![0, 3], vec![32, 0], vec![32, 3, 0, 1], vec![0, u64::MAX]] {
        let mut file = Gguf::small();
        file.tensors[0].dims = dims;
        let message = file.error();
        assert!(message.contains(r#"tensor "token_embd.weight""#), "{message}");
        assert!(message.contains("expected dimensions above zero"), "{message}");
    }
    assert!(gguf_error(&[]).contains("found 0"));
    assert!(Gguf::small().raw_key(b"", vec![0, 0, 0, 0, 0]).error().contains("the name of key 4"));
    let mut file = Gguf::small();
    file.tensors[0].name.clear();
    assert!(file.error().contains("the name of tensor 0"));
}

#[test]
fn alignment_that_is_not_a_power_of_two() {
    for alignment in [3, 31, 33, u32::MAX] {
        let message = Gguf::small().key("general.alignment", &Value::U32(alignment)).error();
        assert!(message.contains(r#"key "general.alignment": expected a power of two"#), "{message}");
    }
    for value in [Value::String("32".into()), Value::F32(32.0), Value::I32(-32), Value::U64(1 << 32)] {
        let message = Gguf::small().key("general.alignment", &value).error();
        assert!(message.starts_with(r#"key "general.alignment": expected an integer"#), "{message}");
    }
    // Powers of two that would make a converted file consist of padding. With the largest allowed one, the second
    // tensor is misaligned.
    for alignment in [1 << 21, 1 << 31] {
        let message = Gguf::small().key("general.alignment", &Value::U32(alignment)).error();
        assert!(message.contains("expected a power of two up to 2^20"), "{message}");
    }
    let message = Gguf::small().key("general.alignment", &Value::U32(1 << 20)).error();
    assert!(message.contains("multiple of the alignment"), "{message}");
}

#[test]
fn tensors_that_end_beyond_the_file() {
    for offset in [32, 96, 1 << 20, 1 << 40, 1 << 62, (1 << 63) - 32, 1 << 63, u64::MAX - 31] {
        let mut file = Gguf::small();
        file.tensors[1].offset = Some(offset);
        let message = file.error();
        assert!(message.contains(r#"tensor "output_norm.weight""#) || offset == 32, "{message}");
        assert!(message.contains(&offset.to_string()), "{message}");
    }
    let mut file = Gguf::small();
    file.tensors[0].dims = vec![32, 3 << 30];
    assert!(file.error().contains(r#"tensor "token_embd.weight" lies at bytes 0 to"#));
}

#[test]
fn tensors_that_are_misaligned() {
    for offset in [1, 31, 63, 65, u64::MAX] {
        let mut file = Gguf::small();
        file.tensors[1].offset = Some(offset);
        let message = file.error();
        assert!(message.contains(r#"tensor "output_norm.weight""#), "{message}");
    }
}

#[test]
fn tensors_that_overlap() {
    let mut file = Gguf::small();
    file.tensors[1].offset = Some(32);
    let message = file.error();
    assert!(message.contains(r#"tensor "output_norm.weight" lies at bytes 32 to 52 of the data"#), "{message}");
    assert!(message.contains("a start at 54 or later"), "{message}");
    file.tensors[1].offset = Some(0);
    assert!(file.error().contains("or later, where the tensor before it ends"));
}

#[test]
fn dimensions_whose_product_overflows() {
    let cases: [&[u64]; 8] = [
        &[u64::MAX],
        &[1 << 63],
        &[1 << 62],
        &[1 << 32, 1 << 32],
        &[1 << 33, 1 << 31],
        &[32, 1 << 59],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        // The product wraps around to a small number.
        &[1 << 32, (1 << 32) + 1],
    ];
    for dims in cases {
        for kind in [0, 1, 2, 8] {
            let mut file = Gguf::small();
            file.tensors[0].dims = dims.to_vec();
            file.tensors[0].kind = kind;
            assert!(file.error().contains(r#"tensor "token_embd.weight""#));
        }
    }
}

#[test]
fn too_many_dimensions() {
    for num_dims in [5, 8, 1 << 16, 1 << 31, u32::MAX] {
        let mut file = Gguf::small();
        file.tensors[0].num_dims = Some(num_dims);
        let message = file.error();
        let expected = format!(r#"dimensions of tensor "token_embd.weight": expected at most 4, found {num_dims}"#);
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn rows_that_are_not_whole_blocks() {
    for dtype in gguf_types().filter(|dtype| dtype.is_quantized()) {
        let len = dtype.block_len() as u64;
        // The second one has whole blocks in total, but not in each row.
        for dims in [[len - 1, 1], [len / 2, 2], [len + 1, len]] {
            let mut file = Gguf::small();
            file.tensors[0] = Tensor { dims: dims.to_vec(), ..Tensor::filled("bad.weight", dtype, &[len, 1]) };
            let message = file.error();
            assert!(message.contains(r#"tensor "bad.weight""#) && message.contains(dtype.name()), "{message}");
            assert!(message.contains("a last dimension of whole blocks"), "{message}");
        }
    }
}

#[test]
fn duplicates() {
    let message = Gguf::small().key("llama.block_count", &Value::U32(2)).error();
    assert!(message.contains(r#"key "llama.block_count" appears twice"#), "{message}");
    let message = Gguf::small().tensor(Tensor::filled("output_norm.weight", DType::F32, &[1])).error();
    assert!(message.contains(r#"tensor "output_norm.weight" appears twice"#), "{message}");
}

#[test]
fn names_cannot_control_a_terminal_or_flood_a_log() {
    let message = Gguf::small().raw_key(b"\x1b[2J\nkey", vec![99, 0, 0, 0]).error();
    assert!(message.contains(r"\u{1b}[2J\nkey") && !message.contains('\u{1b}') && !message.contains('\n'), "{message}");
    let message = Gguf::small().raw_key(&[b'k'; 60_000], vec![99, 0, 0, 0]).error();
    assert!(message.len() < 1000 && message.contains("(60000 bytes)"), "{message}");
}

#[test]
fn pickles() {
    let zip = b"PK\x03\x04\x00\x00archive/data.pkl";
    let pickle = b"\x80\x02}q\x00.";
    let mut cases: Vec<(&str, &[u8])> =
        vec![("model.gguf", zip), ("model.bin", zip), ("weights", pickle), ("model.gguf", pickle)];
    for name in
        ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "model.PKL", "last.ckpt"]
    {
        // Recognised by name, whatever the content.
        cases.push((name, b"anything"));
    }
    for (name, bytes) in cases {
        let message = open_as(name, bytes).unwrap_err().to_string();
        assert!(message.contains("Python pickle") && message.contains(name), "{message}");
        assert!(message.contains("runs whatever code") && message.contains("safetensors"), "{message}");
    }
}

#[test]
fn paths_that_are_not_a_model() {
    let missing = std::env::temp_dir().join("no-such-model.gguf");
    let message = Checkpoint::open(&missing).unwrap_err().to_string();
    assert!(message.contains("no-such-model.gguf: cannot open the model"), "{message}");
    let message = open_as("notes.txt", b"hello").unwrap_err().to_string();
    assert!(message.contains("not a model"), "{message}");
}

#[track_caller]
fn split_error(parts: &[Gguf], given: usize) -> String {
    let folder = put_split(parts);
    Checkpoint::open(&folder.path().join(split_name(given))).unwrap_err().to_string()
}

#[test]
fn a_missing_part_is_named() {
    let folder = put_split(&split_parts());
    folder.remove(&split_name(1));
    for given in [0, 2] {
        let message = Checkpoint::open(&folder.path().join(split_name(given))).unwrap_err().to_string();
        assert!(message.contains("model-00002-of-00003.gguf: missing"), "{message}");
    }
}

#[test]
fn parts_that_disagree() {
    let set = |part: &mut Gguf, key: &str, value: Value| {
        part.keys.retain(|(name, _)| name != key.as_bytes());
        *part = part.clone().key(key, &value);
    };
    // A part whose keys say that it is another one.
    let mut parts = split_parts();
    set(&mut parts[1], "split.no", Value::U16(2));
    let message = split_error(&parts, 0);
    assert!(message.contains("model-00002-of-00003.gguf: the number of the part"), "{message}");
    assert!(split_error(&parts, 1).contains("the name of a part: expected a name that ends in -00003-of-00003.gguf"));

    // A part of another split.
    let mut parts = split_parts();
    set(&mut parts[2], "split.count", Value::U16(4));
    let message = split_error(&parts, 0);
    assert!(
        message.contains(r#"expected "split.no" 2 and "split.count" 3, found "split.no" 2 and "split.count" 4"#),
        "{message}"
    );

    // An unsplit file in place of a part.
    let mut parts = split_parts();
    parts[2] = Gguf::small();
    assert!(split_error(&parts, 0).contains("found a file that is not split"));

    // Fewer tensors than the first part states, and a tensor that is in two parts.
    let mut parts = split_parts();
    parts[2].tensors.clear();
    let message = split_error(&parts, 0);
    assert!(message.contains(r#"expected 2 by "split.tensors.count", found 1"#), "{message}");
    let mut parts = split_parts();
    parts[2].tensors[0].name = b"tensor.1".to_vec();
    assert!(split_error(&parts, 0).contains(r#"tensor "tensor.1" appears twice"#));

    // The message names the damaged part, not the one that was opened.
    let mut parts = split_parts();
    parts[1].version = 7;
    assert!(split_error(&parts, 0).contains("model-00002-of-00003.gguf: GGUF version"));
}

#[test]
fn split_keys_that_are_inconsistent() {
    let with = |number: Value, count: Value| Gguf::small().key("split.no", &number).key("split.count", &count).error();
    assert!(with(Value::U32(u32::MAX), Value::U32(u32::MAX)).contains("the name of a part"));
    assert!(with(Value::U16(3), Value::U16(3)).contains("the name of a part"));
    assert!(with(Value::I32(-1), Value::U16(3)).contains(r#"key "split.no": expected an integer"#));
    assert!(with(Value::U16(0), Value::String("3".into())).contains(r#"key "split.count": expected an integer"#));
    let message = Gguf::small().key("split.count", &Value::U16(3)).error();
    assert!(message.contains("split.no"), "{message}");
}
