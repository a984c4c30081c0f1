//! Hugging Face folders with one error each.

use crate::build::{Folder, SMALL_HEADER, quick_error, safetensors, small_safetensors};
use crate::hugging_face::sharded;

/// Returns the error of a folder whose weights are these bytes. Asserts that it comes quickly.
#[track_caller]
fn weights_error(bytes: &[u8]) -> String {
    let folder = Folder::hugging_face();
    folder.put("model.safetensors", bytes);
    let message = quick_error(folder.path());
    assert!(message.contains("model.safetensors"), "names the file: {message}");
    message
}

/// Returns the error of a file with this header and 22 bytes of data.
#[track_caller]
fn header_error(header: &str) -> String {
    weights_error(&safetensors(header, &[0; 22]))
}

#[test]
fn the_folder_that_the_cases_change_opens() {
    assert!(Folder::hugging_face().open().is_ok());
    assert!(sharded().open().is_ok());
}

#[test]
fn cut_after_every_byte() {
    let bytes = small_safetensors();
    for len in 0..bytes.len() {
        weights_error(&bytes[..len]);
    }
}

#[test]
fn huge_header_lengths() {
    for huge in [1 << 27, 1 << 32, 1 << 62, 1 << 63, u64::MAX - 7, u64::MAX] {
        let mut bytes = small_safetensors();
        bytes[..8].copy_from_slice(&huge.to_le_bytes());
        let message = weights_error(&bytes);
        assert!(message.contains(&format!("the file ends within the header: expected {huge} bytes")), "{message}");
    }
}

/// The file is sparse, and long enough for the header.
#[test]
fn a_header_beyond_the_limit_within_a_longer_file() {
    let folder = Folder::hugging_face();
    let length = (64 << 20) + 1;
    let path = folder.put("model.safetensors", &u64::to_le_bytes(length));
    std::fs::File::options().write(true).open(path).unwrap().set_len(1 << 30).unwrap();
    let message = folder.error();
    assert!(message.contains("expected at most 67108864, found 67108865"), "{message}");
}

#[test]
fn headers_that_are_malformed() {
    let cases = [
        "",
        "null",
        "[]",
        "{",
        r#"{"a":1}"#,
        r#"{"a":{}}"#,
        r#"{"a":{"dtype":"F32","shape":[2,2]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1e30],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":"4","data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}}"#,
    ];
    for header in cases {
        let message = header_error(header);
        assert!(message.contains("not valid JSON"), "{header}: {message}");
    }
    assert!(header_error(cases[4]).contains(r#"tensor "a""#));
    // Text that is not UTF-8, and deep nesting.
    weights_error(&[&2u64.to_le_bytes()[..], b"{\xff", &[0; 22]].concat());
    for bomb in
        ["[".repeat(100_000), r#"{"a":"#.repeat(100_000), format!(r#"{{"__metadata__":{}"#, "[".repeat(100_000))]
    {
        let message = header_error(&bomb);
        assert!(message.contains("not valid JSON"), "{message}");
    }
}

/// Returns a header of one tensor.
fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"bad.weight":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn offsets_outside_the_file() {
    assert!(Folder::hugging_face().open().is_ok());
    for (shape, offsets) in [
        ("[6]", "[0,24]"),
        ("[1]", "[22,26]"),
        ("[1]", "[4,0]"),
        ("[1]", "[18446744073709551612,18446744073709551615]"),
        ("[1]", "[18446744073709551612,0]"),
        ("[1]", "[9223372036854775808,9223372036854775812]"),
        ("[4611686018427387903]", "[0,18446744073709551612]"),
        ("[2305843009213693951]", "[0,9223372036854775804]"),
        ("[4]", "[0,20]"),
        ("[4]", "[0,12]"),
    ] {
        let message = header_error(&one("F32", shape, offsets));
        assert!(message.contains(r#"tensor "bad.weight""#), "{shape} {offsets}: {message}");
    }
}

/// Offsets that fit their shapes, and overflow only when the header's length is added.
#[test]
fn offsets_whose_sum_with_the_header_overflows() {
    let eighth = 1u64 << 61;
    let tensors: Vec<String> = (0..8u64)
        .map(|i| {
            let start = i * eighth;
            let end = if i == 7 { u64::MAX - 7 } else { start + eighth };
            let shape = (end - start) / 4;
            format!(r#""t{i}":{{"dtype":"F32","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let message = weights_error(&safetensors(&format!("{{{}}}", tensors.join(",")), &[]));
    assert!(message.contains(r#"tensor "t0""#), "{message}");
}

#[test]
fn offsets_that_overlap_or_leave_gaps() {
    let overlap = SMALL_HEADER.replace("[16,22]", "[15,21]");
    assert!(
        header_error(&overlap).contains(r#"tensor "b" lies at bytes 15 to 21 of the data: expected a start at 16"#)
    );
    let gap = SMALL_HEADER.replace("[16,22]", "[17,23]");
    assert!(header_error(&gap).contains(r#"tensor "b" lies at bytes 17 to 23 of the data: expected a start at 16"#));
    let message = weights_error(&safetensors(SMALL_HEADER, &[0; 23]));
    assert!(message.contains("expected tensors that cover all of it, found 22 of 23 bytes"), "{message}");
}

#[test]
fn shapes_that_overflow_or_are_empty() {
    for shape in
        ["[4294967296,4294967296]", "[18446744073709551615]", "[9223372036854775807,2]", "[65536,65536,65536,65536]"]
    {
        let message = header_error(&one("BF16", shape, "[0,22]"));
        assert!(message.contains(r#"tensor "bad.weight""#) && message.contains("fits 63 bits"), "{message}");
    }
    assert!(header_error(&one("F32", "[0]", "[0,0]")).contains("expected dimensions above zero"));
    let many = format!("[{}1]", "1,".repeat(100_000));
    let message = header_error(&one("F32", &many, "[0,4]"));
    assert!(message.contains("at most 8 dimensions") && message.len() < 500, "{message}");
}

#[test]
fn unsupported_types_are_named_with_their_tensor() {
    let whole = |dtype: &str, bytes: usize| safetensors(&one(dtype, "[1]", &format!("[0,{bytes}]")), &vec![0; bytes]);
    for (dtype, bytes) in [("I64", 8), ("F64", 8), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1), ("I32", 4), ("F8_E5M2", 1)] {
        let message = weights_error(&whole(dtype, bytes));
        assert!(
            message.contains(r#"tensor "bad.weight" has the unsupported type"#) && message.contains(dtype),
            "{message}"
        );
        assert!(message.contains("supported are F32, F16, BF16"), "{message}");
    }
    let message = header_error(&one("Q4_0", "[1]", "[0,4]"));
    assert!(message.contains(r#"tensor "bad.weight""#) && message.contains("Q4_0"), "{message}");
}

#[test]
fn tensors_that_appear_twice() {
    let twice = SMALL_HEADER.replace(r#""b""#, r#""a""#);
    assert!(header_error(&twice).contains(r#"tensor "a" appears twice"#), "within a file");

    // The second shard also has a tensor "first".
    let folder = sharded();
    let header = r#"{"first":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
        "second":{"dtype":"F16","shape":[1],"data_offsets":[4,6]}}"#;
    folder.put("model-00002-of-00002.safetensors", &safetensors(header, &[0; 6]));
    assert!(folder.error().contains(r#"tensor "first" appears twice"#), "across shards");
}

#[test]
fn an_index_with_a_tensor_that_no_shard_has() {
    let folder = sharded();
    let index =
        r#"{"weight_map": {"first": "model-00001-of-00002.safetensors", "third": "model-00002-of-00002.safetensors"}}"#;
    folder.put("model.safetensors.index.json", index.as_bytes());
    let message = folder.error();
    assert!(
        message.contains(r#"index.json: tensor "third": expected a tensor in one of the shards that the index names"#),
        "{message}"
    );
}

#[test]
fn an_index_that_names_files_outside_the_folder() {
    let outside = Folder::hugging_face();
    let folder = sharded();
    let absolute = outside.path().join("model.safetensors");
    let names = [
        "../model.safetensors",
        "../x",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "..\\model.safetensors",
        "C:model.safetensors",
        ".hidden.safetensors",
        "pytorch_model.bin",
        "config.json",
        "a\0.safetensors",
        absolute.to_str().unwrap(),
    ];
    for name in names {
        let index = serde_json::json!({"weight_map": {"first": name}});
        folder.put("model.safetensors.index.json", index.to_string().as_bytes());
        let message = folder.error();
        assert!(message.contains(r#"model.safetensors.index.json: the shard of tensor "first""#), "{message}");
        assert!(message.contains("expected a plain *.safetensors file name"), "{message}");
    }
}

#[test]
fn an_index_that_is_malformed() {
    let folder = sharded();
    folder.remove("model-00002-of-00002.safetensors");
    let message = folder.error();
    assert!(
        message.contains("model-00002-of-00002.safetensors: missing; model.safetensors.index.json names"),
        "{message}"
    );
    for index in [
        "",
        "[]",
        "null",
        "{}",
        r#"{"weight_map": []}"#,
        r#"{"weight_map": {"first": 1}}"#,
        r#"{"weight_map": {"first": null}}"#,
    ] {
        folder.put("model.safetensors.index.json", index.as_bytes());
        assert!(folder.error().contains("model.safetensors.index.json: "), "{index}");
    }
}

#[test]
fn json_files_that_are_malformed() {
    let bomb = "[".repeat(100_000);
    for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        for text in ["", "{", "{\"a\": 1} x", "\u{0}", &bomb] {
            let folder = Folder::hugging_face();
            folder.put(name, text.as_bytes());
            let message = folder.error();
            assert!(message.contains(&format!("{name}: not valid JSON")), "{message}");
        }
        let folder = Folder::hugging_face();
        folder.put(name, b"\xff\xfe{}");
        assert!(folder.error().contains(&format!("{name}: the text: expected UTF-8")));
        let path = folder.put(name, b"");
        std::fs::File::options().write(true).open(path).unwrap().set_len((16 << 20) + 1).unwrap();
        assert!(folder.error().contains("expected at most 16777216, found 16777217"));
    }
    let folder = Folder::hugging_face();
    folder.put("config.json", b"[]");
    assert!(folder.error().contains("config.json: the configuration: expected a JSON object, found a list"));
    for template in ["1", "{}", "[1]", r#"[{"name": "default"}]"#] {
        let folder = Folder::hugging_face();
        folder.put("tokenizer_config.json", format!(r#"{{"chat_template": {template}}}"#).as_bytes());
        assert!(folder.error().contains(r#"tokenizer_config.json: key "chat_template": expected a string, or a list"#));
    }
}

/// Opening a named pipe blocks until a writer opens it, so pipes are refused without opening them.
#[cfg(unix)]
#[test]
fn json_files_that_are_pipes() {
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let folder = Folder::hugging_face();
        let path = folder.put(name, b"");
        std::fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(folder.error()));
        let message = receiver.recv_timeout(std::time::Duration::from_secs(10)).expect("an answer");
        assert!(message.contains(name) && message.contains("expected a regular file"), "{message}");
    }
}

/// An error that is printed with all its sources states the cause once.
#[test]
fn causes_are_printed_once() {
    let folder = Folder::hugging_face();
    folder.put("config.json", b"{");
    let error = folder.open().unwrap_err();
    assert!(error.to_string().contains("EOF while parsing") && std::error::Error::source(&error).is_none());
}

#[test]
fn a_model_type_that_is_missing_or_not_a_string() {
    let folder = Folder::hugging_face();
    for (config, expected) in [("{}", "has no key"), (r#"{"model_type": 1}"#, "expected a string, found a number")] {
        folder.put("config.json", config.as_bytes());
        let message = folder.open().unwrap().architecture().unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("model_type"), "{message}");
    }
}

#[test]
fn files_that_are_missing() {
    let folder = Folder::hugging_face();
    folder.remove("model.safetensors");
    assert!(folder.error().contains("model.safetensors: missing"));
    let folder = Folder::hugging_face();
    folder.remove("config.json");
    assert!(folder.error().contains("config.json: missing"));
}

#[test]
fn pickles() {
    // A folder without other weights.
    for name in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        let folder = Folder::hugging_face();
        folder.remove("model.safetensors");
        folder.put(name, b"{}");
        let message = folder.error();
        assert!(message.contains(name) && message.contains("Python pickle"), "{message}");
    }
    // A pickle beside safetensors is ignored.
    let folder = Folder::hugging_face();
    folder.put("pytorch_model.bin", b"\x80\x02.");
    assert!(folder.open().is_ok());
    // A pickle with the extension of safetensors.
    assert!(weights_error(b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl").contains("Python pickle"));
    assert!(weights_error(b"\x80\x02ctorch._utils\n_rebuild").contains("Python pickle"));
}

/// Real headers have lengths such as 0x0280 and 0x0580.
#[test]
fn a_header_length_that_looks_like_a_pickle_is_accepted() {
    for length in [0x0280, 0x0580] {
        let folder = Folder::hugging_face();
        let header = format!("{SMALL_HEADER:length$}");
        let bytes = safetensors(&header, &[0; 22]);
        assert_eq!(bytes[0], 0x80);
        folder.put("model.safetensors", &bytes);
        assert_eq!(folder.open().unwrap().tensors().len(), 2);
    }
}
