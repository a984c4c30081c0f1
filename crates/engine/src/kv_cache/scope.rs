//! Owners of blocks of KV memory, and the parts of the prefix cache in which they can be found.

/// A tenant: the owner of requests and blocks. It comes from the authenticated key, never from a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// A part of the prefix cache whose requests find each other's blocks: all of a tenant's, or those with the same salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    /// The tenant.
    pub tenant: TenantId,
    /// Hash of the salt; 0 without one.
    pub(super) salt: u64,
}

impl Scope {
    /// Owner of the prefixes that the operator declared shared. No key belongs to this tenant.
    pub(super) const SHARED: Scope = Scope { tenant: TenantId(u32::MAX), salt: 0 };

    /// The scope of a tenant's requests without a salt.
    pub const fn of(tenant: TenantId) -> Scope {
        Scope { tenant, salt: 0 }
    }

    /// A scope within the tenant's that only requests with the same salt share.
    pub fn salted(tenant: TenantId, salt: &str) -> Scope {
        let digest = blake3::hash(salt.as_bytes());
        let salt = u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"));
        // 0 means unsalted.
        Scope { tenant, salt: salt.max(1) }
    }
}
