//! GPTQ and AWQ: integers in words of 32 bits, with scales and zero points for groups of columns.

use pellucid_tensor::SharedBytes;
use safetensors::Dtype;

use super::encoded::{Codes, ColumnGroups, EncodedValues, QuantizedMatrix, ScaleGrid, Zeros, words};
use super::scheme::Scheme;
use super::{Parts, StoredTensor, weight};
use crate::checkpoint::TensorInfo;
use crate::error::Error;

const SCALES: &str = "[groups of inputs, outputs], by group_size in config.json";
const ZEROS: &str = "a word for 32 / bits outputs of each group";

/// Describes `module.weight` from its parts; `index` is that of `module.qweight`.
pub(super) fn describe(scheme: &Scheme, parts: &mut Parts, index: usize, module: &str) -> Result<TensorInfo, Error> {
    let qweight = parts.take_at(index);
    let (bits, group_size, is_awq) = match *scheme {
        Scheme::Gptq { bits, group_size, .. } => (bits, group_size, false),
        Scheme::Awq { group_size } => (4, group_size, true),
        _ => unreachable!("a scheme of packed words"),
    };
    let per_word = (32 / bits) as usize;
    let [rows, cols] = match (qweight.matrix()?, is_awq) {
        ([cols, words], true) => [words.checked_mul(per_word), Some(cols)],
        ([words, rows], false) => [Some(rows), words.checked_mul(per_word)],
    }
    .map(|size| size.ok_or_else(|| qweight.wrong_shape("a number of values that fits the machine")))
    .into_iter()
    .collect::<Result<Vec<usize>, Error>>()?
    .try_into()
    .expect("two sizes");
    let qweight_shape = qweight.shape.clone();
    let qweight = qweight.checked(Dtype::I32, &qweight_shape, "two dimensions")?;
    if !rows.is_multiple_of(per_word) {
        return Err(qweight.wrong_shape("outputs that fill whole words of zero points"));
    }
    let group_size = group_size.unwrap_or(cols).min(cols);
    let num_groups = cols.div_ceil(group_size);
    let scales = parts.need(&format!("{module}.scales"), &qweight)?;
    let zeros = parts.need(&format!("{module}.qzeros"), &qweight)?;
    let zeros = zeros.checked(Dtype::I32, &[num_groups, rows / per_word], ZEROS)?;
    let listed = match *scheme {
        Scheme::Gptq { desc_act, .. } => match parts.take(&format!("{module}.g_idx")) {
            Some(listed) => column_groups(listed, cols, num_groups, (!desc_act).then_some(group_size))?,
            None if desc_act => return Err(parts.need(&format!("{module}.g_idx"), &qweight).expect_err("not there")),
            None => None,
        },
        _ => None,
    };
    if scales.shape != [num_groups, rows] {
        return Err(scales.wrong_shape(SCALES));
    }
    let num_bytes = [&qweight, &scales, &zeros].iter().map(|part| part.bytes.len()).sum();
    let scales = scales.into_floats()?;
    let zeros = match *scheme {
        Scheme::Gptq { zeros_minus_one, .. } => {
            // The subtraction of one carried from field to field of a word, and so does the addition.
            let ones = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
            Zeros::WordsAcross { bits, added: if zeros_minus_one { ones } else { 0 }, bytes: zeros.bytes }
        }
        _ => Zeros::Awq { bytes: zeros.bytes },
    };
    let columns = listed.map_or(ColumnGroups::Adjacent(group_size), ColumnGroups::Listed);
    let matrix = QuantizedMatrix {
        rows,
        cols,
        codes: if is_awq { Codes::WordsAcross } else { Codes::WordsDown { bits } },
        bytes: qweight.bytes,
        dtype: scales.dtype,
        scales,
        zeros,
        grid: ScaleGrid { groups_first: true, rows_per_scale: 1, num_groups, columns },
    };
    let name = format!("{} {bits}-bit", if is_awq { "AWQ" } else { "GPTQ" });
    Ok(weight(format!("{module}.weight"), vec![rows, cols], name, num_bytes, EncodedValues::of_integers(matrix)))
}

/// Checks the list of each column's group. With `adjacent`, the size of groups, the list must agree with it.
fn column_groups(
    listed: StoredTensor,
    cols: usize,
    num_groups: usize,
    adjacent: Option<usize>,
) -> Result<Option<SharedBytes>, Error> {
    let listed = listed.checked(Dtype::I32, &[cols], "a group for each input")?;
    let is_in_order = |size: usize| words(&listed.bytes).enumerate().all(|(col, group)| group as usize == col / size);
    match adjacent {
        Some(size) if is_in_order(size) => Ok(None),
        Some(_) => Err(invalid_list(&listed, "groups of adjacent inputs, because desc_act in config.json is false")),
        None if words(&listed.bytes).any(|group| group as usize >= num_groups) => {
            Err(invalid_list(&listed, "groups that have scales"))
        }
        None => Ok(Some(listed.bytes)),
    }
}

fn invalid_list(listed: &StoredTensor, expected: &'static str) -> Error {
    Error::invalid(&listed.path, format_args!("tensor {:?}", listed.name), expected, "others")
}
