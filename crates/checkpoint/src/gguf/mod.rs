//! GGUF: a single file, or one split into parts named `x-00001-of-00003.gguf`.
//!
//! Opening any part opens all of them. The metadata is that of the first part; the tensors are those of all parts in
//! order.

mod header;
pub(crate) mod metadata;
mod reader;
mod tensor_type;
pub(crate) mod value;
pub(crate) mod writer;

use std::path::{Path, PathBuf};

use pellucid_tensor::SharedBytes;

use crate::checkpoint::{Contents, Source};
use crate::error::Error;
use crate::file_bytes::FileReader;

pub(crate) use header::{MAGIC, checked_shape};

/// The number of a part, counted from zero, and the number of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    number: u32,
    count: u32,
}

/// Reads a GGUF file whose bytes were read already, and the other parts if it is split.
pub(crate) fn read(path: &Path, bytes: SharedBytes, reader: &mut FileReader<'_>) -> Result<Contents, Error> {
    let file_bytes = bytes.len() as u64;
    let file = header::read(path, &bytes)?;
    let Some(part) = part_of(&file.metadata)? else {
        let files = vec![(path.to_path_buf(), file_bytes)];
        return Ok(Contents { source: Source::Gguf(file.metadata), tensors: file.tensors, files, notes: Vec::new() });
    };
    read_parts(path, part, file, file_bytes, reader)
}

fn part_of(metadata: &metadata::Metadata) -> Result<Option<Part>, Error> {
    match metadata.opt_u32("split.count")? {
        None | Some(0 | 1) => Ok(None),
        Some(count) => Ok(Some(Part { number: metadata.u32("split.no")?, count })),
    }
}

fn read_parts(
    given: &Path,
    given_part: Part,
    given_file: header::File,
    given_bytes: u64,
    reader: &mut FileReader<'_>,
) -> Result<Contents, Error> {
    let stem = stem_of(given, given_part)?;
    let mut given_file = Some(given_file);
    let mut first_metadata = None;
    let mut tensors = Vec::new();
    let mut files = Vec::new();
    for number in 0..given_part.count {
        let expected = Part { number, count: given_part.count };
        let path = if number == given_part.number { given.to_path_buf() } else { part_path(given, &stem, expected) };
        let (file, file_bytes) = match given_file.take_if(|_| number == given_part.number) {
            Some(file) => (file, given_bytes),
            None => read_part(&path, given, expected, reader)?,
        };
        tensors.extend(file.tensors);
        files.push((path, file_bytes));
        first_metadata.get_or_insert(file.metadata);
    }
    let metadata = first_metadata.unwrap_or_default();
    if let Some(expected) = metadata.opt_u64("split.tensors.count")?
        && expected != tensors.len() as u64
    {
        return Err(Error::Split {
            path: given.to_path_buf(),
            what: "the number of tensors in all parts".into(),
            expected: format!("{expected} by \"split.tensors.count\""),
            found: tensors.len().to_string(),
        });
    }
    Ok(Contents { source: Source::Gguf(metadata), tensors, files, notes: Vec::new() })
}

fn read_part(
    path: &Path,
    given: &Path,
    expected: Part,
    reader: &mut FileReader<'_>,
) -> Result<(header::File, u64), Error> {
    if !path.exists() {
        let needed_by = format!("{} is one of {} parts and needs this one as well", given.display(), expected.count);
        return Err(Error::MissingFile { path: path.to_path_buf(), needed_by });
    }
    let bytes = reader.read(path)?;
    let file = header::read(path, &bytes)?;
    let found = part_of(&file.metadata)?;
    if found != Some(expected) {
        let describe = |part: Part| format!("\"split.no\" {} and \"split.count\" {}", part.number, part.count);
        return Err(Error::Split {
            path: path.to_path_buf(),
            what: "the number of the part".into(),
            expected: describe(expected),
            found: found.map_or("a file that is not split".into(), describe),
        });
    }
    Ok((file, bytes.len() as u64))
}

/// Returns the name before `-00001-of-00003.gguf`, after checking that the name agrees with the keys of the file.
fn stem_of(path: &Path, part: Part) -> Result<String, Error> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    // The number within the file counts from zero, the one in the name from one.
    let suffix = suffix(part);
    match name.strip_suffix(&suffix) {
        Some(stem) if part.number < part.count => Ok(stem.into()),
        _ => Err(Error::Split {
            path: path.to_path_buf(),
            what: "the name of a part".into(),
            expected: format!("a name that ends in {suffix}, by the keys \"split.no\" and \"split.count\""),
            found: format!("{name:?}"),
        }),
    }
}

fn suffix(part: Part) -> String {
    format!("-{:05}-of-{:05}.gguf", u64::from(part.number) + 1, part.count)
}

fn part_path(other_part: &Path, stem: &str, part: Part) -> PathBuf {
    other_part.with_file_name(format!("{stem}{}", suffix(part)))
}
