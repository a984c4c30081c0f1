//! The macro behind the table: one entry becomes a field of `SamplingParams`, its neutral value, and a row of
//! `OPTIONS`.

/// Defines `SamplingParams` and `OPTIONS`.
///
/// An entry is `/// doc`, then `field: type = neutral value, Spec;`. Fields under `others` are set by the caller, not
/// by an option.
macro_rules! define_params {
    (
        options { $($(#[doc = $doc:literal])+ $field:ident: $type:ty = $neutral:expr, $spec:expr;)+ }
        others { $($(#[doc = $other_doc:literal])+ $other:ident: $other_type:ty = $other_neutral:expr;)+ }
    ) => {
        /// How to sample each token of a reply.
        ///
        /// `Default` is the model's own distribution: every option at its neutral value, temperature 1. Greedy decoding
        /// is temperature 0.
        #[derive(Debug, Clone, PartialEq)]
        pub struct SamplingParams {
            $($(#[doc = $doc])+ pub $field: $type,)+
            $($(#[doc = $other_doc])+ pub $other: $other_type,)+
        }

        impl Default for SamplingParams {
            fn default() -> Self {
                SamplingParams { $($field: $neutral,)+ $($other: $other_neutral,)+ }
            }
        }

        /// Every sampling option, in the order in which help texts and documents list them.
        pub const OPTIONS: &[SamplingOption] = &[$(SamplingOption {
            param: stringify!($field),
            flag: {
                const BYTES: [u8; stringify!($field).len()] = hyphenated(stringify!($field));
                match std::str::from_utf8(&BYTES) {
                    Ok(flag) => flag,
                    Err(_) => panic!("an identifier is UTF-8"),
                }
            },
            doc: concat!($($doc),+),
            spec: $spec,
            get: |params| Field::read(&params.$field),
            set: |params, value| Field::write(&mut params.$field, value),
        }),+];
    };
}

pub(super) use define_params;

/// Returns a name with hyphens in place of its underscores, as flags have them.
pub(super) const fn hyphenated<const LEN: usize>(name: &str) -> [u8; LEN] {
    let mut flag = [0; LEN];
    let mut index = 0;
    while index < LEN {
        let byte = name.as_bytes()[index];
        flag[index] = if byte == b'_' { b'-' } else { byte };
        index += 1;
    }
    flag
}
